"""A device that hangs or fails costs its callers a bounded wait, and itself its turn until it is well."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest

from kvhearth.store.tiers.folder import Sink
from kvhearth.store.tiers.guard import Call, Health, Reason, TierError, Workers

from .conftest import wait_for


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def reason_of(work: object, workers: Workers, seconds: float) -> Reason:
    with pytest.raises(TierError) as caught:
        workers.run(work, soon(seconds))  # type: ignore[arg-type]
    return caught.value.reason


def test_work_returns_and_raises_through_the_workers() -> None:
    workers = Workers("test", 2)
    assert workers.run(lambda call: 42, soon()) == 42
    with pytest.raises(ZeroDivisionError):
        workers.run(lambda call: 1 // 0, soon())
    workers.close()


def test_a_device_that_never_answers_hangs_no_caller_and_takes_a_bounded_number_of_threads() -> None:
    workers, answer = Workers("hang", 2), threading.Event()
    before = threading.active_count()
    reasons = [reason_of(lambda call: answer.wait(60), workers, 0.02) for _ in range(10)]
    assert threading.active_count() <= before + 2
    assert reasons == [Reason.TIMEOUT] * 10
    calls = [workers.submit(lambda call: answer.wait(60)) for _ in range(4)]  # as many wait as may
    assert reason_of(lambda call: None, workers, 30) is Reason.BUSY
    answer.set()
    assert all(call.result(soon()) for call in calls)
    assert workers.run(lambda call: "well again", soon()) == "well again"
    workers.close()
    wait_for(lambda: threading.active_count() <= before)


def test_where_no_thread_is_to_be_had_work_is_refused_until_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, answer = Workers("scarce", 2), threading.Event()

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        assert [reason_of(lambda call: None, workers, 30) for _ in range(9)] == [Reason.BUSY] * 9
    waiting = workers.submit(lambda call: answer.wait(60))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        queued = workers.submit(lambda call: "by the one that there is")
        answer.set()
        assert queued.result(soon()) == "by the one that there is"
    assert waiting.result(soon())
    answer.clear()
    calls = [workers.submit(lambda call: answer.wait(60)) for _ in range(2)]
    answer.set()
    assert all(call.result(soon()) for call in calls)
    workers.close()


def test_what_was_given_up_before_it_began_is_never_done() -> None:
    workers, answer, done = Workers("late", 1), threading.Event(), []
    reason_of(lambda call: answer.wait(60), workers, 0.01)
    reason_of(lambda call: done.append(1), workers, 0.01)
    answer.set()
    assert workers.run(lambda call: list(done), soon()) == []
    workers.close()


def test_a_late_answer_does_not_touch_the_callers_memory() -> None:
    workers, began, answer, ended = Workers("memory", 1), threading.Event(), threading.Event(), threading.Event()
    buffer = bytearray(8)

    def work(call: Call[None]) -> None:
        sink = Sink(call, [memoryview(buffer)])
        began.set()
        answer.wait(60)
        try:
            sink.take(memoryview(b"too late"))
        finally:
            ended.set()

    call = workers.submit(work)
    assert began.wait(30)
    with pytest.raises(TierError):
        call.result(time.monotonic() + 0.02)
    answer.set()
    assert ended.wait(30)
    assert buffer == bytearray(8)
    workers.close()


def test_a_sink_fills_pieces_of_any_size_in_order() -> None:
    buffer = bytearray(10)
    workers = Workers("sink", 1)

    def work(call: Call[None]) -> None:
        sink = Sink(call, [memoryview(buffer)[:3], memoryview(b""), memoryview(buffer)[3:4], memoryview(buffer)[4:]])
        for piece in (b"ab", b"cdef", b"", b"ghij"):
            sink.take(memoryview(piece))

    workers.run(work, soon())
    assert buffer == b"abcdefghij"
    workers.close()


def fail(health: Health, reason: Reason = Reason.IO) -> Reason:
    with pytest.raises(TierError) as caught, health.watch():
        raise TierError(reason, sick=reason is not Reason.ABSENT)
    return caught.value.reason


def test_three_failures_in_a_row_take_it_down_with_one_log_line_and_a_success_brings_it_back_with_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = Health("the device")
    with caplog.at_level(logging.INFO, logger="kvhearth"):
        assert [fail(health) for _ in range(3)] == [Reason.IO] * 3
        assert health.is_down
        assert fail(health) is Reason.DOWN
        wait_for(lambda: fail(health) is Reason.IO)  # it is tried now and then
        health.heal()
    assert not health.is_down
    assert [record.message for record in caplog.records] == [
        "the device is down (io): the store goes on without it and keeps trying",
        "the device is back",
    ]


def test_misses_do_not_speak_against_the_device() -> None:
    health = Health("the device")
    assert [fail(health, Reason.ABSENT) for _ in range(10)] == [Reason.ABSENT] * 10
    assert not health.is_down


def test_an_error_of_the_operating_system_has_its_reason() -> None:
    health = Health("the device")
    with pytest.raises(TierError) as caught, health.watch():
        os.stat("/nowhere/at/all")
    assert caught.value.reason is Reason.MISSING
