"""What becomes available in the store and what goes: a bounded log with sequence numbers, and those who follow it. How
it is written on a connection is the business of `kvhearth.store.server.feed`.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple

LOG_EVENTS = 65_536
"""Events kept for those who follow; whoever is further behind is told so and begins anew with a snapshot."""

MAX_FOLLOWERS = 64


class EventKind(Enum):
    """What happened to a key in a tier."""

    PUT = "put"
    """It is there now."""
    EVICT = "evict"
    """It is there no more: evicted, expired or deleted."""
    CLEAR = "clear"
    """The tier is empty; the event has no key."""


class Event(NamedTuple):
    """One change. ``tier`` is one letter: ``d`` DRAM, ``k`` disk, ``o`` object."""

    kind: EventKind
    tier: bytes
    key: bytes


class EventLog:
    """The last `LOG_EVENTS` events, numbered from 1. Thread-safe; appending never waits for anyone.

    ``boot_id`` tells one life of a store from the next: numbers begin anew with it.
    """

    def __init__(self) -> None:
        self.boot_id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=LOG_EVENTS)
        self._last = 0
        self._followers: set[Follower] = set()

    @property
    def last(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._last

    @property
    def followers(self) -> int:
        """How many follow."""
        return len(self._followers)

    def append(self, kind: EventKind, tier: bytes, key: bytes = b"") -> None:
        """One more event."""
        with self._lock:
            self._events.append(Event(kind, tier, key))
            self._last += 1
            waking = [follower for follower in self._followers if not follower.woken] if self._followers else ()
            for follower in waking:
                follower.wake()

    def since(self, number: int, most: int) -> Sequence[Event] | None:
        """At most ``most`` events after ``number``; None when some of them are not kept any more (or never were)."""
        with self._lock:
            oldest = self._last - len(self._events)
            if not oldest <= number <= self._last:
                return None
            skipped = number - oldest
            return list(islice(self._events, skipped, skipped + most))

    def follow(self) -> Follower | None:
        """A follower, to be closed when done; None when there are `MAX_FOLLOWERS`."""
        with self._lock:
            if len(self._followers) >= MAX_FOLLOWERS:
                return None
            follower = Follower(self)
            self._followers.add(follower)
            return follower

    def _leave(self, follower: Follower) -> None:
        with self._lock:
            self._followers.discard(follower)


class Follower:
    """Someone who wants to know of new events: ``fd`` is readable once there are some, for `select.poll`."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.woken = False

    def wake(self) -> None:
        """Called by the log, under its lock."""
        self.woken = True
        os.eventfd_write(self.fd, 1)

    def attend(self) -> None:
        """Take note; events from now on make ``fd`` readable again."""
        with self._log._lock:
            if self.woken:
                os.eventfd_read(self.fd)
                self.woken = False

    def close(self) -> None:
        """Follow no more."""
        self._log._leave(self)
        os.close(self.fd)
