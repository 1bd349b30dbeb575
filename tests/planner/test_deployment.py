"""A Stack is simulated with the sizes that its own engines and store would have."""

import pytest

from kvhearth.emulator.config import EmulatorConfig, shape_of
from kvhearth.engine.ports import OffloadMode
from kvhearth.errors import UserError
from kvhearth.planner.deployment import cluster_of, most_tokens, with_mode
from kvhearth.stack import Emulator, Offload, Pool, Stack, Store
from kvhearth.store.server.config import StoreConfig


def stack(mode: str = "shared", pools: int = 1) -> Stack:
    offload = Offload.model_validate({"mode": mode, "dram_size": "2GiB", "blocks_per_chunk": 4})
    emulator = Emulator(store_bytes_scale=2048)
    made = tuple(
        Pool(name=f"p{i}", model="llama-3.1-8b", num_gpu_blocks_override=513, offload=offload, emulator=emulator)
        for i in range(pools)
    )
    return Stack(pools=made, store=Store(size=64 << 20))


def test_engine_is_the_one_that_the_emulator_runs() -> None:
    emulated = shape_of(
        EmulatorConfig(
            "llama-3.1-8b",
            num_gpu_blocks_override=513,
            offload_mode=OffloadMode.NATIVE,
            dram_bytes=2 << 30,
            blocks_per_chunk=4,
        )
    )
    assert cluster_of(stack("native")).engine == emulated.engine


def test_store_holds_what_a_real_one_of_that_size_would() -> None:
    chunk = 4 * 16 * 131_072
    assert cluster_of(stack()).store_chunks == StoreConfig(capacity_bytes=64 << 20).values_held(chunk // 2048)


def test_another_mode_changes_nothing_else() -> None:
    changed = cluster_of(with_mode(stack(), "none")).engine
    assert changed.mode is OffloadMode.NONE
    assert changed.num_blocks == cluster_of(stack()).engine.num_blocks


def test_the_longest_request_is_what_hbm_holds() -> None:
    assert most_tokens(stack()) == 512 * 16


def test_one_pool_at_a_time() -> None:
    with pytest.raises(UserError, match="2 pools; simulate one pool at a time"):
        cluster_of(stack(pools=2))
