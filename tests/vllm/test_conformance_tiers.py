"""The engine model in modes native and shared does, step by step, what vLLM 0.32's Scheduler with its tiers does."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from kvhearth.engine import EngineConfig, EngineModel, JobKind
from kvhearth.engine.ports import DramAdmission

from .oracle_script import ScriptedPort, Started
from .oracle_tiers import TieredVllmScheduler
from .workloads import SAMPLED_TOKEN, TieredWorkload, chunk_names, engine_request, tiered_workloads

EAGER_WORKLOADS, LAZY_WORKLOADS = 1_020, 220
STEP_LIMIT = 5_000


def by_kind(started: list[Started]) -> dict[JobKind, list[tuple[int, ...]]]:
    return {kind: [job.keys for job in started if job.kind is kind] for kind in JobKind}


def run_both(workload: TieredWorkload, seen: Counter[str]) -> None:
    config, script = workload.config, workload.script
    names = [chunk_names(arrival, config) for arrival in workload.arrivals]
    stored: set[int] = set()
    for i, arrival in enumerate(workload.arrivals):
        chunks = len(arrival.prompt) // (config.block_size * config.blocks_per_chunk)
        stored.update(names[i][: min(chunks, script.stored[i % len(script.stored)])])
    theirs = TieredVllmScheduler(config, script, stored)
    try:
        drive(workload, theirs, EngineModel(config), ScriptedPort(script, stored), names, seen)
    finally:
        theirs.close()


def drive(
    workload: TieredWorkload,
    theirs: TieredVllmScheduler,
    ours: EngineModel,
    port: ScriptedPort,
    names: list[tuple[int, ...]],
    seen: Counter[str],
) -> None:
    """Drive both with the same arrivals and transfers, and compare after every step."""
    config = workload.config
    pending = list(enumerate(workload.arrivals))[::-1]
    aborts: dict[int, list[str]] = {}
    for step in range(STEP_LIMIT):
        theirs.begin_step(step)
        port.begin_step(step)
        while pending and pending[-1][1].step <= step:
            index, arrival = pending.pop()
            request_id = f"r{index}"
            theirs.name_chunks([*arrival.prompt, *[SAMPLED_TOKEN] * arrival.output_tokens], names[index])
            theirs.submit(request_id, arrival.prompt, arrival.output_tokens)
            ours.submit(engine_request(request_id, arrival.prompt, arrival.output_tokens, config.block_size))
            if arrival.abort_after is not None:
                aborts.setdefault(step + arrival.abort_after, []).append(request_id)
        ours.take_in(port)  # vLLM takes in at the end of a step what the model takes in when the next begins
        assert ours.blocks_used == theirs.blocks_used
        for request_id in aborts.pop(step, ()):
            theirs.abort(request_id)
            seen["aborted"] += ours.abort(request_id)
        assert ours.has_work == theirs.has_work
        if not ours.has_work and not pending and not aborts:
            break
        scheduled, preempted = theirs.step()
        result = ours.step(port)
        assert list(result.scheduled.items()) == list(scheduled.items())
        assert sorted(result.preempted) == preempted
        assert by_kind(port.started) == by_kind(theirs.started)
        assert ours.dram_usage == theirs.dram_usage
        for request_id in scheduled:
            assert ours.block_table(request_id) == theirs.block_table(request_id)
        assert (ours.num_running, ours.num_waiting) == theirs.scheduler.get_request_counts()
        counters = ours.counters
        assert counters.prefix_cache_queries == theirs.prefix_cache_queries
        assert counters.prefix_cache_hits == theirs.prefix_cache_hits
        assert counters.external_prefix_cache_queries == theirs.external_queries
        assert counters.external_prefix_cache_hits == theirs.external_hits
        assert counters.external_prefix_cache_hits_store == theirs.external_hits_store
        seen["steps"] += 1
        for job in port.started:
            seen[job.kind.value] += 1
            seen[f"{job.kind.value} chunks"] += len(job.keys)
    else:
        pytest.fail(f"not done after {STEP_LIMIT} steps")
    size = config.chunk_bytes
    moved = (counters.load_bytes, counters.save_bytes, counters.fetch_bytes, counters.put_bytes)
    assert moved == tuple(
        theirs.moved[kind] * size for kind in (JobKind.LOAD, JobKind.SAVE, JobKind.FETCH, JobKind.PUT)
    )
    ours.check_integrity()
    tally(config, ours, port, seen)


def tally(config: EngineConfig, ours: EngineModel, port: ScriptedPort, seen: Counter[str]) -> None:
    counters = ours.counters
    seen["workloads"] += 1
    seen[f"workloads {config.mode.value}"] += 1
    seen["preemptions"] += counters.preemptions
    seen["workloads with preemptions"] += counters.preemptions > 0
    seen["hit tokens hbm"] += counters.prefix_cache_hits
    seen["hit tokens dram"] += counters.external_prefix_cache_hits - counters.external_prefix_cache_hits_store
    seen["hit tokens store"] += counters.external_prefix_cache_hits_store
    seen["waited-for saves"] += port.flushed
    seen["short fetches"] += counters.failed_loads
    seen["finished"] += counters.requests_finished


def compare(admission: DramAdmission, workload_count: int) -> Counter[str]:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=workload_count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(tiered_workloads(admission))
    def conforms(workload: TieredWorkload) -> None:
        run_both(workload, seen)

    conforms()
    print(admission, dict(seen))
    return seen


@pytest.mark.timeout(900)
def test_offloads_exactly_as_vllm_does() -> None:
    seen = compare("eager", EAGER_WORKLOADS)
    # The corpus has to contain what it is meant to compare.
    assert seen["workloads"] >= 1_000
    assert seen["workloads native"] >= 200
    assert seen["workloads shared"] >= 400
    assert seen["workloads with preemptions"] >= 200
    assert seen["hit tokens hbm"] >= 10_000
    assert seen["hit tokens dram"] >= 5_000
    assert seen["hit tokens store"] >= 5_000
    assert seen["save"] >= 3_000
    assert seen["load"] >= 500
    assert seen["fetch"] >= 500
    assert seen["put"] >= 1_500
    assert seen["waited-for saves"] >= 200
    assert seen["short fetches"] >= 100
    assert seen["aborted"] >= 500


@pytest.mark.timeout(900)
def test_lazy_admission_saves_exactly_as_the_connectors_does() -> None:
    seen = compare("lazy", LAZY_WORKLOADS)
    assert seen["workloads"] >= 200
    assert seen["workloads with preemptions"] >= 30
    assert seen["save"] >= 200
    assert seen["waited-for saves"] >= 50
    assert seen["load"] >= 20
