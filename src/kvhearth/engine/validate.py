"""What an engine can never do, said when it enters: impossible limits, requests that could never run."""

from __future__ import annotations

from kvhearth.engine.ports import EngineConfig, EngineRequest, OffloadMode
from kvhearth.errors import UserError

_AT_LEAST_ONE = (
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "blocks_per_chunk",
)


def ensure(holds: bool, what: str) -> None:
    """Raises AssertionError unless it ``holds``: for integrity checks, which must not depend on Python's -O."""
    if not holds:
        raise AssertionError(what)


def check_config(config: EngineConfig) -> None:
    """Raises UserError naming the field that makes the engine impossible."""
    for name in _AT_LEAST_ONE:
        if getattr(config, name) < 1:
            raise UserError(f"{getattr(config, name)} is too small", where=name, remedy="give at least 1")
    for name in ("long_prefill_token_threshold", "chunk_bytes"):
        if getattr(config, name) < 0:
            raise UserError(f"{getattr(config, name)} is negative", where=name, remedy="give 0 or more")
    if not 0.0 <= config.watermark < 1.0:
        raise UserError(
            f"{config.watermark} is no fraction", where="watermark", remedy="give at least 0 and less than 1"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
        raise UserError(
            f"{config.max_num_batched_tokens} < max_model_len {config.max_model_len}, without chunked prefill",
            where="max_num_batched_tokens",
            remedy="raise it to max_model_len or enable chunked prefill",
        )
    if config.dram_admission not in ("eager", "lazy"):
        raise UserError(f"{config.dram_admission!r} is unknown", where="dram_admission", remedy="choose eager or lazy")
    if config.mode is not OffloadMode.NONE and config.dram_chunks < 1:
        raise UserError(
            f"{config.dram_chunks} chunks of DRAM in mode {config.mode.value}",
            where="dram_chunks",
            remedy="give at least 1, or choose mode none",
        )


def check_request(request: EngineRequest, config: EngineConfig) -> None:
    """Raises UserError when the request is malformed, or could not run even with the engine to itself."""
    prompt, output = request.prompt_tokens, request.output_tokens
    where = f"request {request.request_id!r}"
    if prompt < 1 or output < 1:
        raise UserError(f"{prompt} prompt and {output} output tokens", where=where, remedy="give at least one of each")
    if prompt + output > config.max_model_len:
        raise UserError(
            f"{prompt} prompt and {output} output tokens exceed max_model_len {config.max_model_len}",
            where=where,
            remedy="shorten it or raise max_model_len",
        )
    full_blocks = (prompt + output) // config.block_size
    if len(request.block_hashes) != full_blocks:
        raise UserError(
            f"{len(request.block_hashes)} block hashes for {prompt + output} tokens",
            where=where,
            remedy=f"give one for each of the {full_blocks} full blocks of {config.block_size} tokens",
        )
    # The last token is sampled but never computed.
    need = -(-(prompt + output - 1) // config.block_size)
    if need > config.num_blocks:
        raise UserError(
            f"needs {need} blocks of KV, HBM has {config.num_blocks}",
            where=where,
            remedy="shorten it or give the engine more blocks",
        )
