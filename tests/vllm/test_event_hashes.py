"""The emulator's KV events are vLLM's own: the same hashes for the same tokens, the same events step by step."""

from __future__ import annotations

from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvhearth.emulator.announcer import Announcer
from kvhearth.emulator.vllm_hashes import ALGORITHMS, Adapter, VllmHasher
from kvhearth.emulator.wire import BlockRemoved, BlockStored, EventBatch
from kvhearth.engine import EngineModel, EngineRequest, KvTier, NoTransfers

from .oracle import VllmScheduler
from .oracle_script import ScriptedPort
from .oracle_tiers import TieredVllmScheduler
from .workloads import (
    SAMPLED_TOKEN,
    TieredWorkload,
    Workload,
    chunk_names,
    engine_request,
    tiered_workloads,
    workloads,
)

# isort: split
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from vllm import SamplingParams

WORKLOADS = 200
STEP_LIMIT = 20_000
TOKENS = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 3), max_size=70)


def vllm_digests(algorithm: str, tokens: list[int], block_size: int, salt: str, adapter: Adapter | None) -> list[bytes]:
    hash_fn = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_fn)
    lora = None if adapter is None else LoRARequest(adapter.name, adapter.number, adapter.path)
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=lora,
        cache_salt=salt or None,
        block_hasher=kv_cache_utils.get_request_block_hasher(block_size, hash_fn),
    )
    return list(request.block_hashes)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("seed", [None, "0", "a shared seed"])
def test_hashes_are_vllms_for_the_same_tokens_salt_and_adapter(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None
) -> None:
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if algorithm.startswith("xxhash"):
            first, second = VllmHasher(algorithm), VllmHasher(algorithm)
            assert first.hashes([1, 2], 2) != second.hashes([1, 2], 2)
            return
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    ours = VllmHasher(algorithm, seed)
    adapters = st.none() | st.builds(
        Adapter, st.text(min_size=1, max_size=9), st.text(min_size=1, max_size=9), st.just(1)
    )
    salts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(TOKENS, st.integers(1, 17), salts, adapters)
    def equal(tokens: list[int], block_size: int, salt: str, adapter: Adapter | None) -> None:
        tokens = tokens or [1]
        theirs = vllm_digests(algorithm, tokens, block_size, salt, adapter)
        assert ours.digests(tokens, block_size, salt, adapter) == theirs
        shown = [kv_cache_utils.maybe_convert_block_hash(digest) for digest in theirs]
        assert ours.hashes(tokens, block_size, salt, adapter) == shown

    equal()
    # The adapter's name and path may be one and the same string, which pickle writes once.
    same = Adapter("twin", "twin", 1)
    assert ours.digests([1, 2, 3], 1, "twin", same) == vllm_digests(algorithm, [1, 2, 3], 1, "twin", same)


class _Recorder:
    """Stands where vLLM's publisher is."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events += batch.events

    def shutdown(self) -> None: ...


def run_both(workload: Workload, seen: Counter[str]) -> None:
    config = workload.config
    theirs, ours = VllmScheduler(config), EngineModel(config, tell_events=True)
    theirs.scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True
    theirs.scheduler.kv_event_publisher = recorder = _Recorder()
    hasher, announcer = VllmHasher(), Announcer(config.block_size, 1, self_describing=False)
    port, answers = NoTransfers(), {}
    pending = list(enumerate(workload.arrivals))[::-1]
    aborts: dict[int, list[str]] = {}
    for step in range(STEP_LIMIT):
        while pending and pending[-1][1].step <= step:
            index, arrival = pending.pop()
            request_id = f"r{index}"
            tokens = [*arrival.prompt, *([SAMPLED_TOKEN] * arrival.output_tokens)]
            hashes = tuple(hasher.hashes(tokens, config.block_size))
            request = EngineRequest(request_id, len(arrival.prompt), arrival.output_tokens, hashes)
            answers[request_id] = SimpleNamespace(request=request, token_ids=array("I", tokens), adapter=None, salt="")
            theirs.submit(request_id, arrival.prompt, arrival.output_tokens)
            ours.submit(request)
            if arrival.abort_after is not None:
                aborts.setdefault(step + arrival.abort_after, []).append(request_id)
        for request_id in aborts.pop(step, ()):
            theirs.abort(request_id)
            ours.abort(request_id)
        if not ours.has_work and not pending and not aborts:
            break
        recorder.events.clear()
        theirs.step()
        told = announcer.translate(ours.step(port).kv_events, answers)
        assert [msgspec.to_builtins(event) for event in told] == [
            msgspec.to_builtins(event) for event in recorder.events
        ]
        for event in told:
            seen[type(event).__name__] += 1
        if step % 7 == 0:  # mostly refused, as blocks are in use
            done = theirs.scheduler.reset_prefix_cache()
            assert ours.reset_prefix_cache() == done
            seen["resets"] += done
    else:
        pytest.fail(f"not done after {STEP_LIMIT} steps")


def test_steps_tell_what_vllms_scheduler_tells_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
    seen: Counter[str] = Counter()

    @settings(
        max_examples=WORKLOADS,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(workloads())
    def conforms(workload: Workload) -> None:
        run_both(workload, seen)

    conforms()
    print(dict(seen))
    assert seen["BlockStored"] > 1_000
    assert seen["BlockRemoved"] > 1_000
    assert seen["AllBlocksCleared"] > 5


class _Noting(list[Any]):
    """Events that vLLM takes out of it stay in ``noted``."""

    def __init__(self, noted: list[Any]) -> None:
        self._noted = noted

    def append(self, event: Any) -> None:
        self._noted.append(event)
        super().append(event)


def run_tiered(workload: TieredWorkload, seen: Counter[str]) -> None:
    """Compare what is told of DRAM over a whole run: vLLM's own manager takes in some of it a step earlier."""
    config, script = workload.config, workload.script
    names = [chunk_names(arrival, config) for arrival in workload.arrivals]
    stored: set[int] = set()
    for i, arrival in enumerate(workload.arrivals):
        chunks = len(arrival.prompt) // (config.block_size * config.blocks_per_chunk)
        stored.update(names[i][: min(chunks, script.stored[i % len(script.stored)])])
    theirs, ours = TieredVllmScheduler(config, script, stored), EngineModel(config, tell_events=True)
    port = ScriptedPort(script, stored)
    raw: list[Any] = []
    theirs._offloading.manager.primary_tier.events = _Noting(raw)
    told: list[tuple[bool, frozenset[int]]] = []
    pending = list(enumerate(workload.arrivals))[::-1]
    try:
        for step in range(STEP_LIMIT):
            theirs.begin_step(step)
            port.begin_step(step)
            while pending and pending[-1][1].step <= step:
                index, arrival = pending.pop()
                theirs.name_chunks([*arrival.prompt, *[SAMPLED_TOKEN] * arrival.output_tokens], names[index])
                theirs.submit(f"r{index}", arrival.prompt, arrival.output_tokens)
                ours.submit(engine_request(f"r{index}", arrival.prompt, arrival.output_tokens, config.block_size))
            ours.take_in(port)
            done = not ours.has_work and not pending
            events = ours.step(port).kv_events  # with what was taken in before it, also if nothing is left to do
            told += [(e.stored, frozenset(e.keys)) for e in events if e.tier is KvTier.DRAM]
            if done:
                break
            theirs.step()
        assert told == [(not e.removed, frozenset(theirs._names[key] for key in e.keys)) for e in raw]
    finally:
        theirs.close()
    for was_stored, _ in told:
        seen["stored" if was_stored else "removed"] += 1


def test_dram_tells_what_vllms_offloading_manager_tells_in_the_same_order() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=WORKLOADS,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(tiered_workloads("eager"))
    def conforms(workload: TieredWorkload) -> None:
        run_tiered(workload, seen)

    conforms()
    print(dict(seen))
    assert seen["stored"] > 500
    assert seen["removed"] > 300


def test_vllms_own_types_read_what_goes_over_the_wire() -> None:
    events = [
        BlockStored(
            [1, 2**64 - 1], None, [5] * 32, 16, 1, "GPU", "poet", [("poet", "salt"), ("poet",)], 0, "full_attention"
        ),
        BlockStored([3], None, [], 0, None, "CPU", None, group_idx=0),
        BlockRemoved([1], "GPU", 0),
    ]
    raw = msgspec.msgpack.encode(EventBatch(12.5, events, 3))
    batch = msgspec.msgpack.decode(raw, type=KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    assert [msgspec.to_builtins(event) for event in batch.events] == [msgspec.to_builtins(event) for event in events]
    assert msgspec.msgpack.encode(batch) == raw
