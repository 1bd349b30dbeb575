"""Ranges of tokens: what was computed, what was found, and where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.engine.accounting import DRAM, HBM, STORE, merge, overlap, settle
from kvhearth.engine.ports import Sources

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)).map(lambda r: (r[0], r[0] + r[1])), max_size=6)


@given(RANGES, st.integers(0, 30), st.integers(0, 12))
def test_ranges_behave_as_sets_of_positions(ranges: list[tuple[int, int]], start: int, length: int) -> None:
    merged: list[tuple[int, int]] = []
    positions: set[int] = set()
    for low, high in ranges:
        merged = merge(merged, low, high)
        positions |= set(range(low, high))
    assert merged == sorted(merged)
    assert sum(high - low for low, high in merged) == len(positions)
    assert overlap(merged, start, start + length) == len(positions & set(range(start, start + length)))


def test_each_prompt_token_gets_the_source_it_came_from() -> None:
    hits = [(0, 32, HBM), (32, 64, DRAM), (64, 96, STORE)]
    assert settle(100, 96, hits, []) == Sources(hbm=32, dram=32, store=32, compute=4)


def test_what_a_short_load_did_not_bring_is_computed() -> None:
    assert settle(100, 48, [(0, 32, HBM), (32, 96, DRAM)], []) == Sources(hbm=32, dram=16, compute=52)


def test_what_the_request_computed_itself_before_a_preemption_stays_computed() -> None:
    assert settle(100, 64, [(0, 64, HBM)], [(32, 80)]) == Sources(hbm=32, compute=68)
