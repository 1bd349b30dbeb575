"""The breaker: three failures in a row and it turns calls away, but never for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.breaker import Breaker


def failing(breaker: Breaker, now: float, times: int) -> None:
    for _ in range(times):
        breaker.failed(now, was_trial=False)


def test_two_failures_are_borne_and_the_third_opens_it() -> None:
    breaker = Breaker()
    failing(breaker, 0.0, 2)
    assert breaker.allows(0.0)
    assert breaker.failed(0.0, was_trial=False)
    assert breaker.is_open
    assert not breaker.allows(0.05)


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = Breaker()
    failing(breaker, 0.0, 2)
    breaker.succeeded()
    failing(breaker, 0.0, 2)
    assert breaker.allows(0.0)


def test_one_call_an_interval_is_let_through() -> None:
    breaker = Breaker()
    failing(breaker, 0.0, 3)
    assert [breaker.allows(now) for now in (0.05, 0.11, 0.12, 0.2, 0.22)] == [False, True, False, False, True]


def test_a_success_closes_it_for_everyone() -> None:
    breaker = Breaker()
    failing(breaker, 0.0, 3)
    assert breaker.allows(0.2)
    assert breaker.succeeded()
    assert [breaker.allows(0.2) for _ in range(3)] == [True] * 3


def test_one_outage_seen_by_many_calls_counts_once() -> None:
    breaker = Breaker()
    failing(breaker, 0.0, 100)
    assert breaker.allows(0.11)


@given(st.integers(3, 200))
def test_however_long_the_outage_it_tries_at_least_every_two_seconds(failures: int) -> None:
    breaker, now = Breaker(), 0.0
    failing(breaker, now, 3)
    for _ in range(failures):
        now += 2.0
        assert breaker.allows(now)
        breaker.failed(now, was_trial=True)
    assert not breaker.allows(now + (1.9 if failures > 6 else 0.05))
