"""Events are numbered without gaps, kept to a bound, and nobody who waits for them sleeps through one."""

from __future__ import annotations

import os
import select
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.dram import events as module
from kvhearth.store.dram.events import LOG_EVENTS, MAX_FOLLOWERS, Event, EventKind, EventLog, Follower

from ..fakes import SECONDS, in_threads


def put(log: EventLog, number: int) -> None:
    log.append(EventKind.PUT, b"d", b"%d" % number)


def is_readable(follower: Follower, seconds: float = 0.0) -> bool:
    return bool(select.select([follower.fd], [], [], seconds)[0])


class TestNumbers:
    def test_events_are_numbered_from_one(self) -> None:
        log = EventLog()
        assert log.last == 0
        put(log, 1)
        log.append(EventKind.CLEAR, b"d")
        assert log.last == 2
        assert log.since(0, 10) == [Event(EventKind.PUT, b"d", b"1"), Event(EventKind.CLEAR, b"d", b"")]
        assert log.since(1, 10) == [Event(EventKind.CLEAR, b"d", b"")]
        assert log.since(2, 10) == []

    def test_a_number_that_was_never_given_is_not_known(self) -> None:
        log = EventLog()
        assert log.since(0, 1) == []
        assert log.since(1, 1) is None
        assert log.since(-1, 1) is None

    def test_who_is_further_behind_than_the_log_reaches_is_told_so(self) -> None:
        log = EventLog()
        for number in range(1, LOG_EVENTS + 11):
            put(log, number)
        assert log.since(9, 1) is None
        assert log.since(10, 1) == [Event(EventKind.PUT, b"d", b"11")]
        assert log.since(LOG_EVENTS + 9, 5) == [Event(EventKind.PUT, b"d", b"%d" % (LOG_EVENTS + 10))]

    @given(st.integers(0, 30), st.integers(0, 35), st.integers(1, 9), st.integers(1, 12))
    def test_it_is_the_end_of_a_list(self, appended: int, after: int, most: int, kept: int) -> None:
        log = EventLog()
        log._events = deque(maxlen=kept)
        for number in range(1, appended + 1):
            put(log, number)
        expected = [Event(EventKind.PUT, b"d", b"%d" % number) for number in range(1, appended + 1)][after:][:most]
        known = max(0, appended - kept) <= after <= appended
        assert log.since(after, most) == (expected if known else None)

    def test_two_lives_of_a_store_are_told_apart(self) -> None:
        assert EventLog().boot_id != EventLog().boot_id

    def test_numbers_from_many_threads_have_no_gap(self) -> None:
        log = EventLog()
        in_threads(*[lambda: [put(log, number) for number in range(500)]] * 4)
        assert log.last == 2000
        assert len(log.since(0, 5000) or ()) == 2000


class TestFollowers:
    def test_a_follower_is_woken_by_an_event_and_rests_when_it_has_attended(self) -> None:
        log = EventLog()
        follower = log.follow()
        assert follower is not None
        assert not is_readable(follower)
        put(log, 1)
        put(log, 2)
        assert is_readable(follower)
        follower.attend()
        assert not is_readable(follower)
        follower.attend()
        put(log, 3)
        assert is_readable(follower)
        follower.close()

    def test_there_is_a_bound_on_followers(self) -> None:
        log = EventLog()
        followers = [log.follow() for _ in range(MAX_FOLLOWERS)]
        assert log.followers == MAX_FOLLOWERS
        assert log.follow() is None
        assert followers[0] is not None
        followers[0].close()
        followers[0] = log.follow()
        assert followers[0] is not None
        for follower in followers:
            assert follower is not None
            follower.close()
        assert log.followers == 0

    def test_one_that_left_costs_nothing_and_its_descriptor_is_closed(self) -> None:
        log = EventLog()
        follower = log.follow()
        assert follower is not None
        follower.close()
        put(log, 1)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(follower.fd)

    def test_nobody_sleeps_through_an_event(self) -> None:
        log = EventLog()
        total = 4 * 2000

        def follow() -> None:
            follower = log.follow()
            assert follower is not None
            met = 0
            while met < total:
                assert is_readable(follower, SECONDS), f"asleep at {met} of {log.last}"
                follower.attend()
                new = log.since(met, total)
                assert new is not None
                met += len(new)
            follower.close()

        in_threads(follow, follow, *[lambda: [put(log, number) for number in range(2000)]] * 4)
        assert log.followers == 0


def test_appending_waits_for_nobody_who_follows() -> None:
    log = EventLog()
    asleep = log.follow()
    assert asleep is not None
    for number in range(module.LOG_EVENTS // 16):
        put(log, number)
    assert log.last == module.LOG_EVENTS // 16
    asleep.close()
