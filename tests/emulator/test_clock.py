"""The emulated clock runs at its scale; lag is kept as sum, maximum and 99th percentile."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.emulator.clock import EmulatedClock, Lag


class Wall:
    """A wall clock that moves when told, and by a millisecond whenever it is read."""

    def __init__(self) -> None:
        self.ns = 5_000_000_000

    def __call__(self) -> int:
        self.ns += 1_000_000
        return self.ns


def test_emulated_time_starts_at_zero_and_runs_at_the_scale() -> None:
    wall = Wall()
    clock = EmulatedClock(20.0, wall)
    wall.ns += 999_000_000
    assert clock.now_ns() == 20_000_000_000


async def test_sleeping_lasts_until_the_emulated_clock_is_there() -> None:
    wall = Wall()
    clock = EmulatedClock(100.0, wall)
    await clock.sleep_until(1_000_000_000)
    assert clock.now_ns() >= 1_000_000_000


async def test_sleeping_ends_early_when_woken() -> None:
    clock, woken = EmulatedClock(1.0), asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, woken.set)
    async with asyncio.timeout(20):
        await clock.sleep_until(3_600 * 1_000_000_000, woken)
    assert woken.is_set()


async def test_sleeping_into_the_past_still_lets_others_run() -> None:
    ran = []
    asyncio.get_running_loop().call_soon(lambda: ran.append(True))
    await EmulatedClock(1.0).sleep_until(0)
    assert ran == [True]


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=300))
def test_lag_is_summed_and_ranked(lags: list[int]) -> None:
    lag = Lag()
    for value in lags:
        lag.add(value)
    assert lag.total_ns == sum(lags)
    assert lag.max_ns == max(lags)
    assert sum(value <= lag.p99_ns() for value in lags) >= math.ceil(0.99 * len(lags))
    assert lag.p99_ns() in lags


def test_the_percentile_forgets_and_the_maximum_does_not() -> None:
    lag = Lag()
    lag.add(1000)
    for _ in range(5000):
        lag.add(1)
    assert lag.p99_ns() == 1
    assert lag.max_ns == 1000


def test_no_step_has_no_lag() -> None:
    assert Lag().p99_ns() == 0
