"""A slice of ``bench/fuzz_http.py``: odd, broken and sound traffic for real routers, and calls with wrong values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from fuzz_http import Calls, Lab, make_case

SEED = 1
CASES = 80


async def test_broken_traffic_harms_nobody_else_and_leaves_nothing_behind() -> None:
    lab = Lab(SEED, CASES)
    try:
        await lab.start()
        await lab.turn()
    finally:
        await lab.stop()
    assert lab.failures == 0  # each is printed, with what plays it again
    assert {"engine 200", "router 400"} <= lab.status.keys()


def test_calls_with_wrong_values_raise_what_is_documented_alone() -> None:
    calls = Calls(SEED)
    calls.make(4000)
    assert calls.failures == 0


async def test_bytes_of_any_kind_from_a_store_are_read_or_refused() -> None:
    calls = Calls(SEED)
    await calls.read(60)
    assert calls.failures == 0


@pytest.mark.parametrize("number", [0, 500])
def test_a_case_follows_from_its_number_so_that_it_can_be_played_again(number: int) -> None:
    assert make_case(SEED, number) == make_case(SEED, number)
