"""How long a dead child waits for its next life."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.control.backoff import Backoff, RestartPolicy

POLICY = RestartPolicy()


def test_waits_double_while_a_child_keeps_dying_young() -> None:
    backoff = Backoff(RestartPolicy(patience=10))
    assert [backoff.died(30.0) for _ in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]


def test_a_healthy_minute_makes_the_next_wait_short_again() -> None:
    backoff = Backoff(POLICY)
    for _ in range(4):
        backoff.died(30.0)
    assert backoff.died(60.0) == POLICY.first_delay_seconds


def test_a_child_that_dies_at_once_five_times_is_given_up_and_retried_slowly() -> None:
    backoff = Backoff(POLICY)
    waits = [backoff.died(0.0) for _ in range(5)]
    assert backoff.given_up
    assert waits[-1] == POLICY.slow_retry_seconds
    backoff.died(30.0)
    assert not backoff.given_up


@settings(deadline=None)
@given(st.lists(st.floats(0, 1000)))
def test_it_agrees_with_the_rule_told_over_the_whole_history(lives: list[float]) -> None:
    backoff = Backoff(POLICY)
    delay, short = POLICY.first_delay_seconds, 0
    for life in lives:
        if life >= POLICY.healthy_seconds:
            delay = POLICY.first_delay_seconds
        short = short + 1 if life < POLICY.short_life_seconds else 0
        wait = backoff.died(life)
        assert wait <= POLICY.slow_retry_seconds
        if short >= POLICY.patience:
            assert backoff.given_up
            assert wait == POLICY.slow_retry_seconds
        else:
            assert not backoff.given_up
            assert wait == delay
            delay = min(delay * 2, POLICY.longest_delay_seconds)
