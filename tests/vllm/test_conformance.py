"""The engine model in mode none does, step by step, what vLLM 0.32's own Scheduler does."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from kvhearth.engine import EngineModel, NoTransfers

from .oracle import VllmScheduler
from .workloads import Workload, engine_request, workloads

WORKLOADS = 1_200
STEP_LIMIT = 20_000


def run_both(workload: Workload, seen: Counter[str]) -> None:
    """Drive both with the same arrivals and compare after every step."""
    theirs, ours = VllmScheduler(workload.config), EngineModel(workload.config)
    port = NoTransfers()
    pending = list(enumerate(workload.arrivals))[::-1]
    aborts: dict[int, list[str]] = {}
    for step in range(STEP_LIMIT):
        while pending and pending[-1][1].step <= step:
            index, arrival = pending.pop()
            request_id = f"r{index}"
            theirs.submit(request_id, arrival.prompt, arrival.output_tokens)
            ours.submit(engine_request(request_id, arrival.prompt, arrival.output_tokens, workload.config.block_size))
            if arrival.abort_after is not None:
                aborts.setdefault(step + arrival.abort_after, []).append(request_id)
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
        assert ours.blocks_used == theirs.blocks_used
        for request_id in scheduled:
            assert ours.block_table(request_id) == theirs.block_table(request_id)
        assert (ours.num_running, ours.num_waiting) == theirs.scheduler.get_request_counts()
        assert ours.counters.prefix_cache_queries == theirs.prefix_cache_queries
        assert ours.counters.prefix_cache_hits == theirs.prefix_cache_hits
        assert not result.waiting_on_transfers or not scheduled
        seen["steps"] += 1
        seen["chunked prefill steps"] += any(n > 1 for n in scheduled.values()) and len(scheduled) > len(result.sampled)
    else:
        pytest.fail(f"not done after {STEP_LIMIT} steps")
    ours.check_integrity()
    seen["workloads"] += 1
    seen["preemptions"] += ours.counters.preemptions
    seen["workloads with preemptions"] += ours.counters.preemptions > 0
    seen["hit tokens"] += ours.counters.prefix_cache_hits
    seen["workloads with hits"] += ours.counters.prefix_cache_hits > 0
    seen["reprefill tokens"] += ours.counters.reprefill_tokens
    seen["finished"] += ours.counters.requests_finished


def test_schedules_preempts_and_hits_exactly_as_vllm_does() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=WORKLOADS,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(workloads())
    def conforms(workload: Workload) -> None:
        run_both(workload, seen)

    conforms()
    print(dict(seen))
    # The corpus has to contain what it is meant to compare.
    assert seen["workloads"] >= 1_000
    assert seen["workloads with preemptions"] >= 300
    assert seen["preemptions"] >= 2_000
    assert seen["workloads with hits"] >= 300
    assert seen["hit tokens"] >= 10_000
    assert seen["chunked prefill steps"] >= 1_000
    assert seen["reprefill tokens"] >= 10_000
    assert seen["aborted"] >= 300
