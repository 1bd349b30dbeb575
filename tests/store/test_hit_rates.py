"""Hit rates on a trace: only leading hits count, nothing beats Belady, and the default is no worse than recency."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.store.hit_rates import BELADY, ChunkTrace, play, play_all
from kvhearth.store.policies import DEFAULT_POLICY, POLICY_NAMES

DATA = Path(__file__).parents[3] / "shared" / "data"
MOONCAKE = DATA / "mooncake_conversation.jsonl"

Requests = list[list[int]]


def traced(requests: Requests) -> ChunkTrace:
    """With fingerprints as a store has them: hashes."""
    return ChunkTrace.of([[xxhash.xxh3_64_intdigest(b"%d" % chunk) for chunk in request] for request in requests], 1000)


prompts = st.builds(
    lambda chain, length: [100 * chain + p + 1 for p in range(length)], st.integers(0, 3), st.integers(1, 4)
)


def conversations(seed: int, users: int = 200, rounds: int = 12) -> Requests:
    """Users who come back a few times with longer prompts, among others who come once."""
    rng = np.random.default_rng(seed)
    requests: Requests = []
    for number in range(users * rounds // 4):
        user = int(rng.zipf(1.3)) % users
        length = min(4 + number * 20 // (users * rounds), 24)
        requests.append([1, *(1_000 * user + p + 10 for p in range(length))])
        requests.append([1, *(1_000_000 + 50 * number + p for p in range(int(rng.integers(1, 12))))])
    return requests


def best_possible(requests: Requests, capacity: int) -> int:
    """Leading hits of the best choices of what to hold, by trying all."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            lead = next((n for n, chunk in enumerate(request) if chunk not in held), len(request))
            pool = held | set(request)
            for keep in combinations(sorted(pool), min(capacity, len(pool))):
                state = frozenset(keep)
                after[state] = max(after.get(state, 0), hits + lead)
        states = after
    return max(states.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=7), st.integers(1, 3))
def test_belady_is_the_best_that_can_be(requests: Requests, capacity: int) -> None:
    assert play(ChunkTrace.of(requests, 1), BELADY, capacity).hits == best_possible(requests, capacity)


@settings(max_examples=60, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=30), st.integers(1, 12))
def test_no_policy_beats_belady_and_with_room_for_all_every_one_reaches_it(requests: Requests, capacity: int) -> None:
    trace = ChunkTrace.of(requests, 10)
    for name in POLICY_NAMES:
        assert play(trace, name, capacity).hits <= play(trace, BELADY, capacity).hits
        assert play(trace, name, trace.distinct).hits == play(trace, BELADY, trace.distinct).hits


def test_a_hit_counts_only_behind_hits() -> None:
    trace = ChunkTrace.of([[1, 2], [3, 4], [3, 4], [1, 2]], 1)
    # With room for three, recency gives up 2 and 1's place is kept: 3 and 4 hit, then 1 alone.
    assert play(trace, "lru", 3).hits == 3
    assert play(trace, "lru", 3).share == 3 / 8


def test_the_default_is_no_worse_than_recency_at_any_capacity() -> None:
    trace = traced(conversations(1))
    capacities = [max(1, trace.distinct * percent // 100) for percent in (1, 2, 5, 10, 20, 40, 70, 100)]
    rates = {
        (rate.policy, rate.capacity_chunks): rate.hits for rate in play_all(trace, [DEFAULT_POLICY, "lru"], capacities)
    }
    assert all(rates[DEFAULT_POLICY, capacity] >= rates["lru", capacity] for capacity in capacities)


def test_processes_change_nothing_and_each_run_is_told() -> None:
    trace = traced(conversations(2, users=40))
    told: list[None] = []
    here = play_all(trace, [*POLICY_NAMES, BELADY], [20, 50], on_done=lambda: told.append(None))
    assert len(told) == len(here) == 8
    assert play_all(trace, [*POLICY_NAMES, BELADY], [20, 50], processes=2) == here


def test_a_trace_without_a_chunk_is_refused() -> None:
    with pytest.raises(UserError, match="no prompt fills a chunk"):
        ChunkTrace.of([[], []], 1)


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the public Mooncake trace is not beside this checkout")
def test_on_the_start_of_the_public_trace_the_default_is_no_worse_than_recency() -> None:
    lines = MOONCAKE.read_text().splitlines()[:600]
    trace = traced([json.loads(line)["hash_ids"] for line in lines])
    for percent in (2, 10, 40):
        capacity = trace.distinct * percent // 100
        assert play(trace, DEFAULT_POLICY, capacity).hits >= play(trace, "lru", capacity).hits
