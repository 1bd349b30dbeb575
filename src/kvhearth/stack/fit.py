"""A Stack against the catalog: do its models and GPUs exist, and does what it asks for fit? Arithmetic is `cost`'s."""

from __future__ import annotations

from pathlib import Path

from kvhearth.cost import CostModel, Model, Parallelism, find_model
from kvhearth.cost.layout import check_split
from kvhearth.errors import UserError
from kvhearth.stack.spec import DEFAULT_GPU_MEMORY_UTILIZATION, Pool, Stack
from kvhearth.units import format_bytes

_FIELDS = {"parallelism.tp": "tensor_parallel_size", "link": "emulator.store_link"}
"""Where `cost` finds a fault, in the Stack's words where they differ."""


def check_catalog(stack: Stack, *, where: str = "stack") -> None:
    """Check every pool's model, GPU, split, memory, DRAM tier and the store's size.

    Raises:
        UserError: with ``where``, the field, the value and the remedy.

    Of real vLLM engines it checks what can be known without running them.
    """
    for index, pool in enumerate(stack.pools):
        try:
            if pool.engine == "vllm":
                _check_vllm(pool, stack)
                continue
            cost = pool_cost(pool)
            _check_hbm(pool, cost)
            _check_chunk(pool, cost, stack)
        except UserError as error:
            raise _placed(error, index, where) from None


def _placed(error: UserError, index: int, where: str) -> UserError:
    """An error of `cost` or of this module at its field's path; one about a config.json keeps that file's name."""
    field = _FIELDS.get(error.where, error.where)
    if field.startswith("store."):
        return UserError(error.what, where=f"{where}: {field}", remedy=error.remedy)
    if field not in Pool.model_fields and not field.startswith(("offload.", "emulator.")):
        what = f"{field}: {error.what}" if field else error.what
        return UserError(what, where=f"{where}: pools[{index}].model", remedy=error.remedy)
    return UserError(error.what, where=f"{where}: pools[{index}].{field}", remedy=error.remedy)


def pool_cost(pool: Pool) -> CostModel:
    """The cost model of a pool's engines.

    Raises:
        UserError: its model or GPU is unknown, or vLLM refuses the split; or its engines run on a CPU.
    """
    if pool.vllm.device == "cpu":
        raise UserError("engines on a CPU have no cost model", where="vllm.device", remedy="measure instead")
    return CostModel(pool_model(pool), pool.gpu, Parallelism(tp=pool.tensor_parallel_size), block_size=pool.block_size)


def pool_model(pool: Pool) -> Model:
    """The shape of a pool's model, from its config.json or the catalog.

    Raises:
        UserError: a file that cannot be read or understood, or an unknown name.
    """
    from_file = pool.model.endswith(".json") or Path(pool.model).is_dir()
    return Model.from_hf_config(pool.model) if from_file else find_model(pool.model)


def chunk_bytes(pool: Pool, cost: CostModel) -> int:
    """Bytes of KV in one chunk of a pool's engines, all layers, each byte once."""
    return cost.kv_bytes_per_token * pool.block_size * pool.offload.blocks_per_chunk


def _check_vllm(pool: Pool, stack: Stack) -> None:
    """What can be said of real engines beforehand: that the model is there and, where its shape is known, that tiers
    hold its chunks. vLLM itself knows the rest, and says so when it starts."""
    if pool.model.startswith("/") and not Path(pool.model).is_dir():
        raise UserError(
            f"no such directory: {pool.model}", where="model", remedy="give the model's directory or Hugging Face id"
        )
    try:
        model = pool_model(pool)
    except UserError:
        return
    check_split(model, Parallelism(tp=pool.tensor_parallel_size))
    if pool.offload.mode == "none":
        return
    value_bytes = 4 if pool.vllm.dtype in ("float32", "float") else 2  # "auto" is never float32
    layers = model.layers - model.window_layers or model.layers
    chunk_tokens = pool.block_size * pool.offload.blocks_per_chunk
    _check_tiers(pool, stack, layers * model.kv_elements * value_bytes * chunk_tokens, store_bytes_scale=1)


def _check_hbm(pool: Pool, cost: CostModel) -> None:
    utilization = pool.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    room = cost.hbm_kv_blocks(utilization, pool.max_num_batched_tokens, pool.max_num_seqs)
    blocks = pool.num_gpu_blocks_override or room
    if blocks > room:
        raise UserError(
            f"{blocks} blocks, but {pool.gpu} has HBM for {room} beside the weights of {cost.model.name}",
            where="num_gpu_blocks_override",
            remedy=f"set at most {room}",
        )
    tokens = (blocks - 1) * pool.block_size  # vLLM keeps one block empty
    if pool.max_model_len is not None and pool.max_model_len > tokens:
        raise UserError(
            f"{pool.max_model_len} tokens, but HBM holds the KV of {tokens}",
            where="max_model_len",
            remedy=f"set at most {tokens}, or give the engine more HBM for KV",
        )


def _check_chunk(pool: Pool, cost: CostModel, stack: Stack) -> None:
    if pool.offload.mode == "none":
        return
    _check_tiers(pool, stack, chunk_bytes(pool, cost), store_bytes_scale=pool.emulator.store_bytes_scale)
    if pool.offload.mode == "shared" and stack.store is not None:
        cost.link(pool.emulator.store_link)


def _check_tiers(pool: Pool, stack: Stack, chunk: int, *, store_bytes_scale: int) -> None:
    if pool.offload.dram_size < chunk:
        raise UserError(
            f"{format_bytes(pool.offload.dram_size)} is less than one chunk ({format_bytes(chunk)}) of this model",
            where="offload.dram_size",
            remedy="raise it to hold many chunks, or lower offload.blocks_per_chunk",
        )
    if pool.offload.mode == "shared" and stack.store is not None:
        stored = chunk // store_bytes_scale
        if stack.store.size < 2 * stored:  # a value takes at most half of a store
            raise UserError(
                f"{format_bytes(stack.store.size)} is too little for chunks of {format_bytes(stored)} as stored",
                where="store.size",
                remedy="raise it to hold many chunks, or lower that pool's offload.blocks_per_chunk",
            )
