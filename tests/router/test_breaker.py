"""An engine that fails is left alone for a while, then tried with one request at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.router.breaker import ENOUGH, REMEMBERED, Breaker
from kvhearth.router.config import Resilience

SETTINGS = Resilience(failures_to_open=3, error_share=0.5, open_seconds=1.0, longest_open_seconds=4.0)


def opened(breaker: Breaker, now: float) -> Breaker:
    while breaker.state != "open":
        breaker.failed(now)
    return breaker


def test_failures_in_a_row_open_it_and_an_answer_between_them_does_not_let_them_add_up():
    breaker = Breaker(SETTINGS)
    assert [breaker.failed(0.0), breaker.failed(0.0)] == [False, False]
    assert not breaker.answered(0.0, is_error=False)
    assert [breaker.failed(0.0), breaker.failed(0.0), breaker.failed(0.0)] == [False, False, True]
    assert breaker.state == "open"


def test_errors_open_it_by_their_share_of_the_last_answers_once_there_are_enough():
    breaker = Breaker(SETTINGS)
    for number in range(ENOUGH - 1):
        assert not breaker.answered(0.0, is_error=number % 2 == 0)
    assert breaker.answered(0.0, is_error=True)
    assert breaker.state == "open"


def test_fewer_errors_than_that_never_do():
    breaker = Breaker(SETTINGS)
    for number in range(10 * REMEMBERED):
        breaker.answered(0.0, is_error=number % 3 == 0)
    assert breaker.state == "closed"


def test_after_its_time_one_success_closes_it():
    breaker = opened(Breaker(SETTINGS), 10.0)
    assert not breaker.tick(10.9)
    assert breaker.tick(11.0)
    assert breaker.state == "half_open"
    assert breaker.answered(11.1, is_error=False)
    assert breaker.state == "closed"


@pytest.mark.parametrize("fail", [lambda b, now: b.failed(now), lambda b, now: b.answered(now, is_error=True)])
def test_a_trial_that_fails_opens_it_for_twice_as_long_up_to_a_bound(fail):
    breaker, now, waits = opened(Breaker(SETTINGS), 0.0), 0.0, []
    for _ in range(4):
        start = now
        while not breaker.tick(now):
            now += 0.5
        waits.append(now - start)
        assert fail(breaker, now)
    assert waits == [1.0, 2.0, 4.0, 4.0]


def test_what_was_under_way_when_it_opened_changes_nothing():
    breaker = opened(Breaker(SETTINGS), 0.0)
    assert not breaker.answered(0.5, is_error=False)
    assert not breaker.failed(0.5)
    assert breaker.state == "open"
    assert breaker.opened == 1


def test_an_engine_that_has_started_anew_begins_with_a_clean_slate():
    breaker = opened(Breaker(SETTINGS), 0.0)
    assert breaker.reset()
    assert breaker.state == "closed"
    assert not breaker.reset()
    assert not breaker.failed(0.0)


@given(st.lists(st.sampled_from(["ok", "error", "fail", "tick"]), max_size=400))
def test_it_is_never_open_without_a_reason_and_never_for_longer_than_the_bound(happenings):
    breaker, now, open_since, failures, answers = Breaker(SETTINGS), 0.0, None, 0, []
    for what in happenings:
        now += 0.25
        before = breaker.state
        if what == "tick":
            breaker.tick(now)
        elif what == "fail":
            breaker.failed(now)
        else:
            breaker.answered(now, is_error=what == "error")
        if before == "closed":
            failures = failures + 1 if what == "fail" else failures if what == "tick" else 0
            answers += [] if what == "tick" else [what != "ok"]
            recent = answers = answers[-REMEMBERED:]
            if not any(recent) and not failures:
                answers = []
            by_share = len(recent) >= ENOUGH and sum(recent) >= 0.5 * len(recent) and what in ("error", "fail")
            assert (breaker.state == "open") == (failures >= 3 or by_share)
        if breaker.state == "open":
            open_since = now if before != "open" else open_since
            if what == "tick":
                assert now - open_since < 4.0
        else:
            open_since = None
        if before != breaker.state or breaker.state != "closed":
            failures, answers = 0, []
