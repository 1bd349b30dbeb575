"""What one client that maps the store's memory holds of it: leases on values that it copies out, uploads that it copies
in. They are bounded, and end with the client's connection at the latest. Knows no wire form.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvhearth.store.dram.table import Published, Upload
from kvhearth.store.protocol.grants import MAX_NUMBERS, MAX_PIECES, Grant, Refusal, refuse
from kvhearth.store.server.tiered import Tiered

_SHARE = 8
"""A connection holds at most this part of the pool, all connections together half of it."""
_AT_ONCE = 64
_LAST_NUMBER = 2**32 - 1


class _Lease(NamedTuple):
    slot: int
    nbytes: int
    since: float


class _Arriving(NamedTuple):
    key: bytes
    upload: Upload
    nbytes: int
    since: float


class Loans:
    """Loans of one connection. For its thread alone, but for `overdue`.

    A loan that is older than ``seconds`` makes `overdue` true, and the connection is cut; a client that is stopped for
    that long in the middle of a copy then goes on in memory that may be another value's. Whoever reads that value finds
    out by its checksum, as does the client itself of what it copied out.

    Args:
        seconds: longest life of a loan.
    """

    def __init__(self, store: Tiered, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._seconds = seconds
        self._clock = clock
        self._limit_bytes = store.table.stats().capacity_bytes // _SHARE
        self._held: dict[int, _Lease | _Arriving] = {}
        self._held_bytes = 0
        self._number = 0
        self._oldest = math.inf

    def lease(self, keys: Sequence[bytes]) -> list[Grant]:
        """The values under ``keys``, whose bytes stay as they are until `release`."""
        grants: list[Grant] = []
        for start in range(0, len(keys), _AT_ONCE):  # what is beyond the bound is held for a moment too
            some = keys[start : start + _AT_ONCE]
            waiting = deque(self._store.table.lease_many(some))
            try:
                grants += [self._lease(key, waiting.popleft()) for key in some]
            finally:
                for slot in waiting:  # none, but where a tier raised after all
                    if slot is not None:
                        self._store.table.release(slot)
        return grants

    def release(self, number: int) -> bool:
        """End a lease; whether there was one of this number."""
        lease = self._held.get(number)
        if not isinstance(lease, _Lease):
            return False
        self._drop(number, lease)
        self._store.table.release(lease.slot)
        return True

    def reserve(self, key: bytes, nbytes: int) -> Grant:
        """Memory for a value that will be put under ``key``, until `commit` or `abandon`."""
        if not self._take(nbytes):
            return refuse(Refusal.BUSY)
        table = self._store.table
        upload = table.reserve(nbytes)
        if upload is None:
            self._give_back(nbytes)
            return refuse(Refusal.NO_ROOM)
        pieces = table.upload_runs(upload)
        if len(pieces) > MAX_PIECES:
            table.abandon(upload)
            self._give_back(nbytes)
            return refuse(Refusal.BUSY)
        return Grant(self._hold(_Arriving(key, upload, nbytes, self._clock())), pieces)

    def commit(self, number: int) -> Published | None:
        """Publish an upload, whose bytes are all there; None when there is none of this number."""
        arriving = self._held.get(number)
        if not isinstance(arriving, _Arriving):
            return None
        self._drop(number, arriving)
        return self._store.publish(arriving.key, arriving.upload)

    def abandon(self, number: int) -> bool:
        """Give up an upload; whether there was one of this number."""
        arriving = self._held.get(number)
        if not isinstance(arriving, _Arriving):
            return False
        self._drop(number, arriving)
        self._store.table.abandon(arriving.upload)
        return True

    def overdue(self, now: float) -> bool:
        """Whether something has been held for too long at ``now`` (monotonic seconds). From any thread."""
        return now - self._oldest > self._seconds

    def close(self) -> None:
        """End every loan."""
        for number in list(self._held):
            if not self.release(number):
                self.abandon(number)

    def __len__(self) -> int:
        return len(self._held)

    def _lease(self, key: bytes, slot: int | None) -> Grant:
        """Hold the value in ``slot``, which is leased, or else the one under ``key`` in a lower tier."""
        if slot is None:
            slot = self._store.lease(key)
        if slot is None:
            return refuse(Refusal.ABSENT)
        table = self._store.table
        nbytes, pieces = table.nbytes(slot), table.runs(slot)
        if len(pieces) > MAX_PIECES or not self._take(nbytes):
            table.release(slot)
            return refuse(Refusal.BUSY)
        return Grant(self._hold(_Lease(slot, nbytes, self._clock())), pieces)

    def _take(self, nbytes: int) -> bool:
        # The first may be larger than the share, so that small stores lend too.
        if len(self._held) >= MAX_NUMBERS or (self._held and self._held_bytes + nbytes > self._limit_bytes):
            return False
        if not self._store.lent.take(nbytes):
            return False
        self._held_bytes += nbytes
        return True

    def _give_back(self, nbytes: int) -> None:
        self._held_bytes -= nbytes
        self._store.lent.give_back(nbytes)

    def _hold(self, loan: _Lease | _Arriving) -> int:
        while True:
            self._number = self._number % _LAST_NUMBER + 1
            if self._number not in self._held:
                break
        self._held[self._number] = loan
        self._oldest = min(self._oldest, loan.since)
        return self._number

    def _drop(self, number: int, loan: _Lease | _Arriving) -> None:
        del self._held[number]
        self._give_back(loan.nbytes)
        # The dictionary is in the order of lending.
        self._oldest = next((held.since for held in self._held.values()), math.inf)
