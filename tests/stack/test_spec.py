"""The Stack as a value."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvhearth.stack import Offload, Pool, Stack, Store


def shared(replicas: int) -> Pool:
    return Pool(model="Llama-3.1-8B", name="chat", replicas=replicas, offload=Offload(mode="shared"))


def test_engines_are_named_after_their_pool() -> None:
    stack = Stack(pools=(shared(2), Pool(model="Qwen3-8B")), store=Store())
    assert [engine.name for engine in stack.engines()] == ["chat-0", "chat-1", "qwen3-8b-0"]


def test_a_pool_is_named_after_the_last_part_of_its_model() -> None:
    assert Pool(model="meta-llama/Llama-3.1-8B-Instruct").name == "llama-3-1-8b-instruct"
    assert Pool(model="/models/My Model/config.json").name == "my-model"
    assert Pool(model="日本").name == "pool"


def test_a_stack_cannot_be_changed() -> None:
    stack = Stack(pools=(Pool(model="m"),))
    with pytest.raises(ValidationError):
        stack.name = "other"


def test_sizes_take_units_and_plain_bytes() -> None:
    assert Store.model_validate({"size": "4GiB"}).size == Store(size=4 << 30).size == 4 << 30
    assert Store.model_validate({"size": "4GB"}).size == 4_000_000_000
    with pytest.raises(ValidationError):
        Store.model_validate({"size": True})


def test_sharing_with_nobody_is_warned_about_and_allowed() -> None:
    assert Stack(pools=(shared(2),), store=Store()).warnings() == []
    (warning,) = Stack(pools=(shared(1),), store=Store()).warnings()
    assert "chat-0 is the only engine of mode shared" in warning


def test_a_store_and_a_dram_tier_that_nothing_uses_are_warned_about() -> None:
    pool = Pool(model="m", offload=Offload(mode="none", dram_size=1 << 30))
    store, dram = Stack(pools=(pool,), store=Store()).warnings()
    assert "no pool has offload mode shared" in store
    assert dram == "pools[0].offload.dram_size has no effect in mode none"


def test_a_store_is_either_started_here_or_runs_elsewhere() -> None:
    with pytest.raises(ValidationError, match="the store at address is not started here; leave out listen"):
        Store(address="a:7420", listen="127.0.0.1:1")
    with pytest.raises(ValidationError, match="2 on the one node that is started here"):
        Store(copies=2)
    with pytest.raises(ValidationError, match="2 is not emulated"):
        Stack(pools=(shared(2),), store=Store(address="a:7420,b:7420", copies=2))


def test_a_stores_further_settings_lie_beside_the_stack(tmp_path: Path) -> None:
    pools = [{"name": "chat", "model": "m"}]
    stack = Stack.model_validate({"pools": pools, "store": {"config": "store.yaml"}}, context={"directory": tmp_path})
    assert stack.store is not None
    assert stack.store.config == str(tmp_path / "store.yaml")
