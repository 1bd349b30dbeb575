"""From flags to an engine's shape: how many blocks and chunks its memories hold. Arithmetic; the facts are `cost`'s."""

from __future__ import annotations

from kvhearth.cost import CostModel
from kvhearth.engine.ports import DramAdmission, EngineConfig, OffloadMode
from kvhearth.errors import UserError
from kvhearth.units import format_bytes

DEFAULT_MAX_MODEL_LEN = 131_072
LEAST_STORED_BYTES = 64


def size_engine(
    cost: CostModel,
    *,
    gpu_memory_utilization: float,
    num_gpu_blocks_override: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int | None,
    mode: OffloadMode,
    dram_bytes: int,
    blocks_per_chunk: int,
    dram_admission: DramAdmission = "eager",
) -> EngineConfig:
    """The engine that these flags (vLLM's, and the offload tier's) make of a model on a GPU.

    Args:
        cost: the model on the GPU; its ``block_size`` is the engine's.
        num_gpu_blocks_override: KV blocks in HBM, one of which stays empty as in vLLM; None = what memory gives.
        max_model_len: longest prompt plus output; None = 131,072 or what HBM holds, whichever is less.
        dram_bytes: DRAM tier in bytes of KV (modes native and shared).
        dram_admission: when chunks go there.

    Raises:
        UserError: weights that HBM cannot hold, or limits that contradict each other; names the flag.
    """
    # Also with an override: weights that do not fit are refused, as vLLM would.
    room = cost.hbm_kv_blocks(gpu_memory_utilization, max_num_batched_tokens, max_num_seqs)
    usable_blocks = (num_gpu_blocks_override or room) - 1
    chunk_bytes = cost.kv_bytes_per_token * cost.block_size * blocks_per_chunk
    return EngineConfig(
        num_blocks=usable_blocks,
        block_size=cost.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=_max_model_len(max_model_len, usable_blocks, cost.block_size),
        mode=mode,
        blocks_per_chunk=blocks_per_chunk,
        dram_chunks=0 if mode is OffloadMode.NONE else _dram_chunks(dram_bytes, chunk_bytes),
        chunk_bytes=chunk_bytes,
        dram_admission=dram_admission,
    )


def stored_bytes(chunk_bytes: int, bytes_scale: int) -> int:
    """Real bytes that stand in the store for an emulated engine's chunk, one for ``bytes_scale`` of KV, 64 at least."""
    return max(LEAST_STORED_BYTES, chunk_bytes // bytes_scale)


def _max_model_len(asked: int | None, usable_blocks: int, block_size: int) -> int:
    room = usable_blocks * block_size
    if asked is None:
        return min(DEFAULT_MAX_MODEL_LEN, room)
    if not 2 <= asked <= room:
        raise UserError(
            f"{asked} tokens; HBM holds {room} in {usable_blocks} blocks of {block_size}",
            where="max_model_len",
            remedy=f"give 2 to {room}, or more blocks",
        )
    return asked


def _dram_chunks(dram_bytes: int, chunk_bytes: int) -> int:
    chunks = dram_bytes // chunk_bytes
    if chunks < 1:
        raise UserError(
            f"{format_bytes(dram_bytes)} do not hold one chunk of {format_bytes(chunk_bytes)}",
            where="dram_bytes",
            remedy="give more, or choose offload mode none",
        )
    return chunks
