"""The real engine on the CPU with the real store: what comes back from DRAM and from the store is what was computed.

The oracle is a local prefix hit of the same length: its log-probabilities must come out bit for bit. A cold run splits
the prefill otherwise, so it agrees within a tolerance that one zeroed chunk breaks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhearth.connector.tiny_models import make_tiny_model

from .engine_process import EngineProcess
from .servers import StoreProcess

TOKENS = 3000
RESTORABLE = (TOKENS - 1) // 32 * 32
TOLERANCE = 1e-3


def prompt(seed: int, count: int = TOKENS) -> list[int]:
    return [random.Random(seed * 7919 + i).randrange(10, 4000) for i in range(count)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_tiny_model(kind, folder / kind) for kind in ("llama", "sliding-window")}


@pytest.fixture(scope="module")
def big_store() -> Iterator[StoreProcess]:
    process = StoreProcess("1GiB")
    process.start()
    yield process
    process.kill()


def settings(store: StoreProcess, **more: Any) -> dict[str, Any]:
    tier = {"type": "StoreTier", "module_path": "kvhearth.connector", "address": store.address, "pool": "test"}
    return {
        "cpu_bytes_to_use": 200 << 20,
        "secondary_tiers": [{**tier, "lookup_timeout_seconds": 5.0, "load_timeout_seconds": 20.0}],
        **more,
    }


def worst(left: dict[str, Any], right: dict[str, Any]) -> float:
    """The largest difference of log-probabilities that both know of."""
    pairs = [
        abs(a[token] - b[token])
        for a, b in zip(left["logprobs"], right["logprobs"], strict=True)
        for token in a.keys() & b
    ]
    assert pairs
    return max(pairs)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["llama", "sliding-window"])
def test_restored_kv_is_what_was_computed(kind: str, models: dict[str, Path], big_store: StoreProcess) -> None:
    mine = prompt(1 if kind == "llama" else 2)
    # The hybrid model's blocks are half the size, and one request needs more of them.
    options: dict[str, Any] = {"num_gpu_blocks_override": 160 if kind == "llama" else 400}
    extra = settings(big_store)
    engine = EngineProcess(models[kind], extra, **options)
    try:
        assert engine.call("shm_files") == []  # no name since all have mapped it: an unclean exit leaves nothing
        cold = engine.generate(mine)
        local = engine.generate(mine)
        assert (cold["cached"], local["cached"]) == (0, RESTORABLE)
        assert 0 < worst(cold, local) + 1e-12 < TOLERANCE

        engine.call("settle")
        assert engine.call("forget_hbm")
        from_dram = engine.generate(mine)
        assert from_dram["cached"] == RESTORABLE
        assert from_dram["logprobs"] == local["logprobs"]
        metrics = engine.call("metrics")
        assert metrics["vllm:kv_offload_load_bytes"] > 0
        assert metrics.get("kvhearth_connector_get_bytes", 0) == 0

        engine.call("forget_hbm")
        engine.call("forget_dram")
        from_store = engine.generate(mine)
        assert from_store["cached"] == RESTORABLE
        assert from_store["logprobs"] == local["logprobs"]
        assert engine.call("metrics")["kvhearth_connector_get_bytes"] > 0

        # Groups apart: a salt finds nothing of another's, nor of those without one.
        salted = engine.generate(mine[:600], salt="a")
        assert salted["cached"] == 0
        engine.call("settle")
        assert engine.generate(mine[:600], salt="b")["cached"] == 0
        engine.call("forget_hbm")
        assert engine.generate(mine[:600], salt="a")["cached"] == 576

        # After a reset, which weight updates bring, nothing from before is believed.
        assert engine.call("reset")
        assert engine.generate(mine[:600], salt="a")["cached"] == 0
        assert engine.generate(mine[:600], salt="a")["cached"] == 576

        # The tolerance means something: one zeroed chunk breaks it.
        engine.call("forget_dram")
        engine.call("forget_hbm")
        engine.generate(mine)
        engine.call("settle")
        engine.call("forget_hbm")
        engine.call("zero_a_chunk")
        spoilt = engine.generate(mine)
        assert spoilt["cached"] == RESTORABLE
        assert worst(spoilt, cold) > TOLERANCE

        engine.kill()
    finally:
        engine.close()
    with EngineProcess(models[kind], extra, **options) as restarted:
        again = restarted.generate(mine)
        assert again["cached"] >= 0.99 * RESTORABLE
        assert again["logprobs"] == local["logprobs"]


@pytest.mark.timeout(900)
def test_prefill_on_one_engine_and_decode_on_another(models: dict[str, Path], big_store: StoreProcess) -> None:
    mine = prompt(5)
    with (
        EngineProcess(models["llama"], settings(big_store)) as decode,
        EngineProcess(models["llama"], settings(big_store)) as prefill,
    ):
        promise = {"kvhearth": {"await_tokens": RESTORABLE, "await_seconds": 60}}
        decode.tell("generate", [{"prompt": mine, "params": promise}])
        prefill.generate(mine, output=1)
        prefill.call("settle")
        answer = decode.answer()[0]
        assert answer["cached"] >= 0.99 * RESTORABLE
        local = prefill.generate(mine)
        assert local["cached"] == RESTORABLE
        assert answer["logprobs"] == local["logprobs"]

        # A second engine of the pool, and requests that are preempted for want of blocks.
        prompts = [prompt(10 + i, 1600) for i in range(3)]
        alone = [prefill.generate(each, output=150, logprobs=1) for each in prompts]
        prefill.call("settle")
        before = decode.call("metrics")
        together = decode.call("generate", [{"prompt": each, "output": 150, "logprobs": 1} for each in prompts])
        after = decode.call("metrics")
        assert after["vllm:num_preemptions"] > before["vllm:num_preemptions"]
        loaded = after["vllm:kv_offload_load_bytes"] - before["vllm:kv_offload_load_bytes"]
        assert loaded > 3 * 50 * (512 << 10)  # the prompts' chunks from the store, and the victim's once more
        for one, other in zip(alone, together, strict=True):
            same = next((i for i, (a, b) in enumerate(zip(one["tokens"], other["tokens"], strict=True)) if a != b), 150)
            left = [next(iter(step.values())) for step in one["logprobs"][:same]]
            right = [next(iter(step.values())) for step in other["logprobs"][:same]]
            assert max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0) < TOLERANCE
