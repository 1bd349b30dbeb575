"""From a Stack to what the simulator plays it on: the same sizes and links that its emulated engines would have."""

from __future__ import annotations

from functools import partial

from kvhearth.cost import CostModel
from kvhearth.engine.links import modelled_links
from kvhearth.engine.ports import OffloadMode
from kvhearth.engine.sizing import size_engine, stored_bytes
from kvhearth.errors import UserError
from kvhearth.planner.cluster import ClusterConfig
from kvhearth.routing.ttft import ModelledCost
from kvhearth.stack import DEFAULT_GPU_MEMORY_UTILIZATION, Pool, Stack, stack_of
from kvhearth.stack.fit import chunk_bytes, pool_cost
from kvhearth.store.server.config import StoreConfig


def cluster_of(stack: Stack) -> ClusterConfig:
    """The simulated cluster of a Stack with one pool.

    Raises:
        UserError: several pools (each has its own workload; simulate them one by one), or sizes that do not fit.
    """
    if len(stack.pools) != 1:
        raise UserError(
            f"{len(stack.pools)} pools",
            where="pools",
            remedy="simulate one pool at a time: a workload is for one model",
        )
    pool = stack.pools[0]
    cost = pool_cost(pool)
    engine = size_engine(
        cost,
        gpu_memory_utilization=pool.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION,
        num_gpu_blocks_override=pool.num_gpu_blocks_override,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_model_len=pool.max_model_len,
        mode=OffloadMode(pool.offload.mode),
        dram_bytes=pool.offload.dram_size,
        blocks_per_chunk=pool.offload.blocks_per_chunk,
        dram_admission=pool.offload.dram_admission,
    )
    return ClusterConfig(
        engines=pool.replicas,
        engine=engine,
        cost=cost,
        links=partial(modelled_links, cost, pool.emulator.store_link, engine.chunk_bytes),
        policy=stack.router.policy,
        store_chunks=_store_chunks(stack, pool, cost),
        ttft_cost=ModelledCost(cost, pool.emulator.store_link, engine.chunk_bytes),
    )


def with_mode(stack: Stack, mode: str) -> Stack:
    """The same Stack with every pool in another offload mode.

    Raises:
        UserError: mode shared without a store.
    """
    values = stack.model_dump()
    for pool in values["pools"]:
        pool["offload"]["mode"] = mode
    return stack_of(values)


def most_tokens(stack: Stack) -> int:
    """Prompt plus output of the longest request that the (first pool's) engines can serve."""
    engine = cluster_of(stack).engine
    return min(engine.max_model_len, engine.num_blocks * engine.block_size)


def _store_chunks(stack: Stack, pool: Pool, cost: CostModel) -> int:
    """Chunks that the store has room for. A Stack sizes it in real memory, where an emulated chunk is scaled down."""
    if stack.store is None:
        return 0
    row_bytes = stored_bytes(chunk_bytes(pool, cost), pool.emulator.store_bytes_scale)
    return StoreConfig(capacity_bytes=stack.store.size).values_held(row_bytes)
