"""The store's values over all tiers, as its commands see them: what DRAM lacks is lifted from the tiers below, and what
is put or deleted is put or deleted in all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvhearth.metrics import MetricFamily
from kvhearth.metrics import store as m
from kvhearth.store.dram.events import EventKind
from kvhearth.store.dram.index import fingerprint_of
from kvhearth.store.dram.table import DRAM, LIFTED, Published, Table, Upload
from kvhearth.store.server.allowance import Allowance
from kvhearth.store.server.crossings import Crossings
from kvhearth.store.server.mover import Mover
from kvhearth.store.tiers.figures import merged
from kvhearth.store.tiers.port import Tier

_log = logging.getLogger(__name__)

ABSENT = b"-"
"""In an answer of one letter a key: there is no such value."""

_LIFT_THREADS = 4
_MAX_WAITING = 4096
_JOIN_SECONDS = 6.0
_LETTERS = (ABSENT + DRAM).ljust(256)


class Tiered:
    """Values in DRAM and below. Thread-safe.

    Args:
        table: the DRAM tier.
        tiers: the lower tiers, the quickest first; started and closed here.
        write_through: save each value below when it is put, not only before it leaves DRAM.
        min_sights: values are saved below from their n-th put or use on.
        read_seconds: longest wait for a value from below.
        read_ahead: lift what a question about a chain found below, as it is likely to be fetched next.
    """

    def __init__(
        self,
        table: Table,
        tiers: Sequence[Tier] = (),
        *,
        write_through: bool = False,
        min_sights: int = 1,
        read_seconds: float = 1.0,
        read_ahead: bool = True,
    ) -> None:
        self.table = table
        self.tiers = list(tiers)
        for tier in self.tiers:
            tier.watcher = partial(self._noticed, tier.letter)
        self.lent = Allowance(table.stats().capacity_bytes // 2)
        """What clients that map the memory hold of it."""
        self._read_seconds = read_seconds
        self._read_ahead = read_ahead
        self._crossings = Crossings()
        self._mover = Mover(table, tiers, self._crossings, write_through, min_sights) if tiers else None
        self._changed = threading.Condition()
        self._lifting: set[bytes] = set()
        self._waiting: deque[bytes] = deque()
        self._listing = _Listing(())
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._lifts: dict[tuple[str, str], int] = {}

    def start(self) -> None:
        """Start the tiers and the threads between them."""
        for tier in self.tiers:
            tier.start()
        if self._mover is not None:
            self._mover.start()
            for number in range(_LIFT_THREADS):
                thread = threading.Thread(target=self._lift_ahead, name=f"kvhearth-store-lift-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self, flush_seconds: float = 0.0) -> None:
        """Save what is only in DRAM, for so long, and end the threads and the tiers. The table stays."""
        if self._mover is not None:
            if flush_seconds > 0:
                self._mover.flush(flush_seconds)
            self._mover.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(min(self._read_seconds, _JOIN_SECONDS))
        for tier in self.tiers:
            tier.close()

    # ---- values

    def lease(self, key: bytes) -> int | None:
        """The slot in DRAM of the value under ``key``, lifted there if need be, until `Table.release`; None: there is
        none to be had in time."""
        slot = self.table.lease(key)
        if slot is None and self.tiers and self._lift(key):
            slot = self.table.lease(key)
        return slot

    def publish(
        self, key: bytes, upload: Upload, *, ttl_seconds: float | None = None, only_if_present: bool | None = None
    ) -> Published:
        """As `Table.publish`; a value of before in lower tiers goes, and the new one is saved in time."""
        if only_if_present is not None and self.tiers and self.table.length(key) is None:
            below = any(tier.has([key])[0] for tier in self.tiers)
            if below and not only_if_present:
                self.table.abandon(upload)
                return Published.UNWANTED
            only_if_present = only_if_present if not below else None
        if not self.tiers:
            return self.table.publish(key, upload, ttl_seconds=ttl_seconds, only_if_present=only_if_present)
        with self._crossings.changing([key]):
            outcome = self.table.publish(key, upload, ttl_seconds=ttl_seconds, only_if_present=only_if_present)
            if outcome is not Published.UNWANTED:
                self._delete_below([key])
        if self._mover is not None and outcome is Published.STORED:
            self._mover.put(key)
        return outcome

    def delete(self, keys: Sequence[bytes]) -> int:
        """Drop ``keys`` everywhere; how many were somewhere."""
        if not self.tiers:
            return len(self.table.delete(keys))
        with self._crossings.changing(keys):
            return len({*self.table.delete(keys), *self._delete_below(list(dict.fromkeys(keys)))})

    def clear(self) -> None:
        """Drop everything everywhere."""
        with self._crossings.clearing():
            self.table.clear()
            for tier in self.tiers:
                tier.clear()
                self.table.events.append(EventKind.CLEAR, tier.letter)

    def expire(self, key: bytes, ttl_seconds: float) -> bool:
        """As `Table.expire`; a value with a life of its own is in DRAM only."""
        slot = self.lease(key)
        if slot is None:
            return False
        try:
            with self._crossings.changing([key]):
                there = self.table.expire(key, ttl_seconds)
                self._delete_below([key])
        finally:
            self.table.release(slot)
        return there

    def prefetch(self, keys: Sequence[bytes]) -> int:
        """Lift the values under ``keys`` into DRAM soon; how many are there already or were taken on."""
        letters = self.where(keys, touch=False)
        below = [key for key, letter in zip(keys, letters, strict=True) if letter not in (DRAM[0], ABSENT[0])]
        return letters.count(DRAM) + self._queue(below)

    def lift_ahead(self, keys: Sequence[bytes]) -> None:
        """Begin to lift what of ``keys`` is below, side by side, as all of them are about to be used one by one."""
        if self.tiers and len(keys) > 1:
            self.prefetch(keys)

    # ---- questions

    def where(self, keys: Sequence[bytes], *, touch: bool = True) -> bytes:
        """The tier of each of ``keys``, a letter each: `DRAM`, a lower tier's, or `ABSENT`."""
        found = self.table.present(keys) if touch else self.table.present_quietly(keys)
        if all(found):
            return DRAM * len(found)
        letters = bytearray(bytes(found).translate(_LETTERS))
        for tier in self.tiers:
            missing = [n for n, letter in enumerate(letters) if letter == ABSENT[0]]
            if not missing:
                break
            for n, nbytes in zip(missing, tier.has([keys[n] for n in missing]), strict=True):
                if nbytes:
                    letters[n] = tier.letter[0]
        return bytes(letters)

    def leading(self, keys: Sequence[bytes]) -> bytes:
        """As `where`, up to the first that is absent; what is below is lifted ahead of its use."""
        letters = self.where(keys)
        leading = letters[: letters.index(ABSENT)] if ABSENT in letters else letters
        if self._read_ahead and self.tiers:
            self._queue([key for key, letter in zip(keys, leading, strict=False) if letter != DRAM[0]])
        return leading

    def length(self, key: bytes) -> int | None:
        """Bytes of the value under ``key``; None when it is nowhere."""
        nbytes = self.table.length(key)
        if nbytes is None:
            nbytes = next((n for tier in self.tiers if (n := tier.has([key])[0])), None)
        return nbytes

    def count(self) -> int:
        """How many values there are, at least: one that two lower tiers have is counted once, if both have the same."""
        below = 0
        for number, tier in enumerate(self.tiers):
            below = max(below, tier.stats().items - self.table.count_saved(1 << number))
        return len(self.table) + below

    def keys_below(self, start: int, most: int) -> tuple[list[bytes], int]:
        """About ``most`` keys that a lower tier has and that were not put in DRAM, and where to go on (0: at the end).

        They come in the order of `order_below`, so that one that is there all the while is met, whatever comes and goes
        around it. Only the call that begins with 0 looks at the tiers; the others go on in what it found.
        """
        listing = self._listing
        if not start or not listing.keys:
            keys = dict.fromkeys(key for tier in self.tiers for key in tier.keys())  # noqa: SIM118 - no mapping
            self._listing = listing = _Listing(tuple(keys))
        keys_found, start = listing.some(start, most)
        if not start:
            self._listing = _Listing(())
        here = self.table.put_here(keys_found)
        return [key for key, is_here in zip(keys_found, here, strict=True) if not is_here], start

    def metrics(self) -> Iterable[MetricFamily]:
        """Of the lower tiers and the ways between."""
        if self._mover is None:
            return
        yield from merged(family for tier in self.tiers for family in tier.metrics())
        yield from self._mover.metrics()
        with self._changed:
            lifts = [(key, float(number)) for key, number in self._lifts.items()]
        yield MetricFamily(m.LIFTS, lifts)

    # ---- internals

    def _lift(self, key: bytes) -> bool:
        """Bring a value up; whether it is in DRAM now. One thread reads, others that want the same wait for it."""
        deadline = time.monotonic() + self._read_seconds
        with self._changed:
            if key in self._lifting:
                self._changed.wait_for(lambda: key not in self._lifting, self._read_seconds)
                return True  # the caller looks again
            self._lifting.add(key)
        try:
            return any(self._lift_from(number, key, deadline) for number in range(len(self.tiers)))
        finally:
            with self._changed:
                self._lifting.discard(key)
                self._changed.notify_all()

    def _lift_from(self, number: int, key: bytes, deadline: float) -> bool:
        tier = self.tiers[number]
        version = self._crossings.version(key)
        nbytes = tier.has([key])[0]
        if version is None or not nbytes or self._crossings.is_saving(key, 1 << number):
            return False
        upload = self.table.reserve(nbytes)
        if upload is None:
            self._count(tier, "no_room")
            return False
        try:
            was_read = tier.read_into(key, self.table.upload_views(upload), deadline)
        except BaseException:  # out of memory, say
            self.table.abandon(upload)
            raise
        if not was_read:
            self.table.abandon(upload)
            self._count(tier, "missed")
            return False
        outcome = self.table.publish(
            key,
            upload,
            only_if_present=False,
            saved=LIFTED | self._bits_with(key),
            unless=lambda: not self._crossings.is_current(key, version),
        )
        self._count(tier, "lifted" if outcome is Published.STORED else "not_kept")
        return outcome in (Published.STORED, Published.UNWANTED)

    def _bits_with(self, key: bytes) -> int:
        return sum(1 << number for number, tier in enumerate(self.tiers) if tier.has([key])[0])

    def _lift_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                key = self._waiting.popleft()
            try:
                if self.table.length(key) is None:
                    self._lift(key)
            except Exception:
                _log.exception("a value could not be lifted")

    def _queue(self, keys: Sequence[bytes]) -> int:
        if not keys:
            return 0
        with self._changed:
            taken = keys[: max(0, _MAX_WAITING - len(self._waiting))]
            self._waiting.extend(taken)
            self._changed.notify_all()
        return len(taken)

    def _delete_below(self, keys: list[bytes]) -> list[bytes]:
        dropped = []
        for tier in self.tiers:
            # One that is down says that it has nothing, and would bring it back when it is up again; so would one that
            # has not found everything yet.
            may_have_all = tier.is_down or not tier.ready
            for key, nbytes in zip(keys, tier.has(keys), strict=True):
                if (nbytes or may_have_all) and tier.delete([key]):
                    dropped.append(key)
                    self.table.events.append(EventKind.EVICT, tier.letter, key)
        return dropped

    def _noticed(self, letter: bytes, key: bytes, is_there: bool) -> None:
        self.table.events.append(EventKind.PUT if is_there else EventKind.EVICT, letter, key)

    def _count(self, tier: Tier, outcome: str) -> None:
        with self._changed:
            self._lifts[tier.name, outcome] = self._lifts.get((tier.name, outcome), 0) + 1


def order_below(key: bytes) -> int:
    """Where `Tiered.keys_below` has a key: 1 to 2**58."""
    return (fingerprint_of(key) >> 6) + 1


class _Listing:
    """Keys in the order of `order_below`."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        order = np.fromiter(map(order_below, keys), np.int64, len(keys))
        places = np.argsort(order)
        self._order: NDArray[np.int64] = order[places]
        self.keys = [keys[place] for place in places.tolist()]

    def some(self, start: int, most: int) -> tuple[list[bytes], int]:
        """Keys from ``start`` on, ``most`` and those that share a place with the last of them; and where to go on."""
        first = int(np.searchsorted(self._order, start))
        if first + most >= len(self.keys):
            return self.keys[first:], 0
        last = int(self._order[first + most - 1])
        stop = int(np.searchsorted(self._order, last, side="right"))
        return self.keys[first:stop], last + 1 if stop < len(self.keys) else 0
