"""Calls side by side: results in order, none left running, none made after the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvhearth.store.ring.fan_out import FanOut

SECONDS = 10.0


@pytest.fixture
def fan_out() -> Iterator[FanOut]:
    made = FanOut(2)
    yield made
    made.close()


def in_time() -> float:
    return time.monotonic() + SECONDS


def test_results_come_in_order(fan_out: FanOut) -> None:
    assert fan_out.run([], in_time()) == []
    assert fan_out.run([lambda number=number: number for number in range(20)], in_time()) == list(range(20))


def test_calls_run_side_by_side(fan_out: FanOut) -> None:
    meet = threading.Barrier(3)
    assert fan_out.run([lambda: meet.wait(SECONDS) >= 0] * 3, in_time()) == [True] * 3


def test_a_call_without_a_thread_before_the_deadline_is_not_made(fan_out: FanOut) -> None:
    go_on, all_taken, made = threading.Event(), threading.Barrier(4), []

    def wait() -> None:
        all_taken.wait(SECONDS)
        go_on.wait(SECONDS)

    busy = threading.Thread(target=fan_out.run, args=([wait] * 3, in_time()))
    busy.start()
    all_taken.wait(SECONDS)
    try:
        answers = fan_out.run([lambda: "own", lambda: made.append("late") or "late"], time.monotonic() + 0.05)
    finally:
        go_on.set()
        busy.join(SECONDS)
    assert answers == ["own", None]
    assert fan_out.run([lambda: 1] * 3, in_time()) == [1, 1, 1]
    assert made == []


def test_what_a_call_raises_is_raised_once_all_have_ended(fan_out: FanOut) -> None:
    ended = []

    def slow() -> None:
        time.sleep(0.05)
        ended.append(True)

    def wrong() -> None:
        raise ValueError("wrong use")

    with pytest.raises(ValueError, match="wrong use"):
        fan_out.run([wrong, slow, slow], in_time())
    assert ended == [True, True]


def test_after_close_callers_make_their_calls_themselves(fan_out: FanOut) -> None:
    fan_out.close()
    assert fan_out.run([threading.get_ident] * 3, in_time()) == [threading.get_ident()] * 3
