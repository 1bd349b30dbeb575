"""Keys to values in the pool: eviction by a policy that spares pinned values, quotas, time to live, uploads invisible
until whole, leases while sending.

Thread-safe; every call is short. The bytes themselves are read and written by the callers, outside the lock, through
views: an upload's views belong to the uploader until `publish`, a leased slot's pages are not reused until `release`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kvhearth.store.dram.allocator import PAGE_BYTES, pages_for
from kvhearth.store.dram.events import EventKind, EventLog
from kvhearth.store.dram.index import Index
from kvhearth.store.dram.lives import Lives
from kvhearth.store.dram.payers import Excess, Payers
from kvhearth.store.dram.pins import Pins
from kvhearth.store.dram.places import Places, Runs, extents
from kvhearth.store.dram.pool import Pool, Progress
from kvhearth.store.dram.rules import Rules
from kvhearth.store.dram.shares import Share
from kvhearth.store.policies import make_policy
from kvhearth.store.policies.late import Late
from kvhearth.store.protocol.header import Header, peek_header

DRAM = b"d"
"""This tier's letter on the wire."""

LIFTED = 128
"""Beside the bits of the lower tiers: the value was not put here, but lifted from one of them."""

_SPARE_SLOTS = 16_384
"""For values that are gone from the index and still being sent."""
_ITEMS_SPARED = 16
_NO_HEADER = Header()


class Upload:
    """Memory for a value that is arriving."""

    __slots__ = ("nbytes", "runs")

    def __init__(self, runs: Runs, nbytes: int) -> None:
        self.runs = runs
        self.nbytes = nbytes


class Published(Enum):
    """What became of an upload."""

    STORED = "stored"
    UNWANTED = "unwanted"
    """Its condition on the key did not hold."""
    NO_ROOM = "no_room"
    """Everything else is being sent or pinned."""
    OVER_QUOTA = "over_quota"
    """Its namespace's or group's quota is taken by what cannot go."""


class TableStats(NamedTuple):
    """Figures of one moment. ``used_bytes``, ``uploading_bytes`` and ``pinned_bytes`` count whole pages; uploads and
    leased dead values are used too."""

    items: int
    value_bytes: int
    used_bytes: int
    capacity_bytes: int
    uploading_bytes: int
    pinned_bytes: int
    evictions: int
    expirations: int
    refused_uploads: int


class Table:
    """The values of one store.

    Args:
        capacity_bytes: memory for values, rounded down to whole pages.
        max_items: values held at once; bounds what keys and bookkeeping take beside the pool.
        progress: called while the pool is faulted in.
        rules: how to decide what stays.
        events: where puts and evictions are told.
        huge_pages: take the pool from the system's reserved huge pages.
        clock: monotonic seconds.

    Raises:
        UserError: the memory cannot be had.
    """

    def __init__(
        self,
        capacity_bytes: int,
        max_items: int,
        progress: Progress | None = None,
        *,
        rules: Rules | None = None,
        events: EventLog | None = None,
        huge_pages: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules = rules or Rules()
        self._clock = clock
        self.events = events or EventLog()
        pages = capacity_bytes // PAGE_BYTES
        slots = max_items + _SPARE_SLOTS
        self._places = Places(pages, slots, progress, huge_pages=huge_pages)
        self._max_items = max_items
        # Uploads may take half of the pool, so that slow senders cannot drive out everything that is worth keeping.
        # Pins may take the other half: a value that may be uploaded then always finds room beside them.
        self._max_uploading_pages = pages // 2
        self._pins = Pins(pages // 2, max_items // 2)
        self._lock = threading.Lock()
        self._index = Index(slots)
        self._policy = Late(make_policy(rules.policy, self._index.facts, pages * PAGE_BYTES))
        self._payers = Payers(rules, slots)
        self._lives = Lives(slots)
        self._saved: NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self._sights: NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.counts_sights = False
        """Whether uses are counted one by one, for `sights`."""
        self._leases: dict[int, int] = {}
        self._buried: set[int] = set()
        self._going: set[int] = set()
        self._going_pages = 0
        self._value_bytes = 0
        self._uploading_pages = 0
        self._evictions = 0
        self._expirations = 0
        self._refused_uploads = 0
        self.on_pressure: Callable[[], None] | None = None
        """Called, under the lock, when less than ``low_pages`` are free or nearly as many values are held as may be."""
        self.low_pages = 0

    # ---- values come

    def reserve(self, nbytes: int) -> Upload | None:
        """Memory for a value about to arrive, evicting as needed; None when there is none to be had now.

        The caller must end it with `publish` or `abandon`.
        """
        pages = pages_for(nbytes)
        with self._lock:
            if self._uploading_pages + pages > self._max_uploading_pages or not self._make_room(pages):
                self._refused_uploads += 1
                return None
            runs = self._places.take(nbytes)
            self._uploading_pages += pages
            self._tell_pressure()
            return Upload(runs, nbytes)

    def publish(
        self,
        key: bytes,
        upload: Upload,
        *,
        ttl_seconds: float | None = None,
        only_if_present: bool | None = None,
        saved: int = 0,
        unless: Callable[[], bool] | None = None,
    ) -> Published:
        """Make a fully received value visible under ``key``, in place of any other, or give its memory back.

        Args:
            key: its key. A pin on it stays if the new value is within the bound.
            upload: from `reserve`; not to be used again.
            ttl_seconds: life; None: the rules' own; ``inf``: for ever.
            only_if_present: publish only if the key is there (True) or is not (False).
            saved: bits of the lower tiers that have this value already, with `LIFTED` when it came from there.
            unless: asked when nothing can come in between; true: do not publish.
        """
        header = peek_header(self.upload_views(upload)[0]) if upload.nbytes else None
        with self._lock:
            now = self._clock()
            self._uploading_pages -= pages_for(upload.nbytes)
            old = self._live_slot(key, now)
            unwanted = only_if_present is not None and (old is not None) != only_if_present
            if unwanted or (unless is not None and unless()):
                self._places.give_back(upload.runs)
                return Published.UNWANTED
            pin = self._pins.until(old) if old is not None else None
            sights = 1
            if old is not None:
                sights = min(255, self.sights(old) + 1)
                self._bury(old, told=True)
            outcome = self._hold(key, upload, header or _NO_HEADER, now, ttl_seconds, pin, saved, sights)
            if old is not None and outcome is not Published.STORED:
                self.events.append(EventKind.EVICT, DRAM, key)
            return outcome

    def abandon(self, upload: Upload) -> None:
        """Give up an upload."""
        with self._lock:
            self._uploading_pages -= pages_for(upload.nbytes)
            self._places.give_back(upload.runs)

    def upload_views(self, upload: Upload) -> list[memoryview]:
        """Where the bytes of an upload go, in order."""
        return self._places.views(upload.runs, upload.nbytes)

    # ---- values go out

    def lease(self, key: bytes) -> int | None:
        """The slot of the value under ``key``, which counts as used; its bytes stay as they are until `release`."""
        with self._lock:
            slot = self._live_slot(key, self._clock())
            if slot is not None:
                self._touch([slot])
                self._leases[slot] = self._leases.get(slot, 0) + 1
            return slot

    def lease_many(self, keys: Sequence[bytes]) -> list[int | None]:
        """As `lease` for each of ``keys``; touched last to first, so that a chain loses its tail first."""
        with self._lock:
            slots = self._live_slots(keys)
            found = [slot for slot in reversed(slots) if slot is not None]
            self._touch(found)
            for slot in found:
                self._leases[slot] = self._leases.get(slot, 0) + 1
            return slots

    def release(self, slot: int) -> None:
        """End a lease."""
        with self._lock:
            left = self._leases[slot] - 1
            if left:
                self._leases[slot] = left
                return
            del self._leases[slot]
            if slot in self._buried:
                self._buried.discard(slot)
                self._free(slot)

    def views(self, slot: int) -> list[memoryview]:
        """The bytes of a leased value, in order."""
        nbytes = self.nbytes(slot)
        return self._places.views(self._places.runs(slot, nbytes), nbytes)

    def nbytes(self, slot: int) -> int:
        """Length of a leased value."""
        return int(self._index.facts.nbytes[slot])

    def runs(self, slot: int) -> list[tuple[int, int]]:
        """Where a leased value lies in the pool: (offset, length) in bytes, in order."""
        nbytes = self.nbytes(slot)
        return extents(self._places.runs(slot, nbytes), nbytes)

    def upload_runs(self, upload: Upload) -> list[tuple[int, int]]:
        """Where an upload's bytes go, as `runs`."""
        return extents(upload.runs, upload.nbytes)

    # ---- questions

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each of ``keys`` is there; touched last to first, so that a chain loses its tail first."""
        with self._lock:
            slots = self._live_slots(keys)
            held = [slot for slot in slots if slot is not None] if None in slots else cast(list[int], slots)
            self._touch(held[::-1])
            return [True] * len(slots) if len(held) == len(slots) else [slot is not None for slot in slots]

    def length(self, key: bytes) -> int | None:
        """Bytes of the value under ``key``, None when absent."""
        with self._lock:
            slot = self._live_slot(key, self._clock())
            return self.nbytes(slot) if slot is not None else None

    def ttl_seconds(self, key: bytes) -> float | None:
        """Seconds that the value under ``key`` still has, ``inf`` without an end; None when absent."""
        with self._lock:
            now = self._clock()
            slot = self._live_slot(key, now)
            return self._lives.end(slot) - now if slot is not None else None

    def keys_from(self, cursor: int, most: int) -> tuple[list[bytes], int]:
        """Some keys and where to go on (0: at the end); a key held all the while and not put anew is met once."""
        with self._lock:
            keys, cursor = self._index.keys_from(cursor, most)
            return [key for key, slot in zip(keys, self._live_slots(keys), strict=True) if slot is not None], cursor

    def __len__(self) -> int:
        return len(self._index)

    # ---- changes

    def expire(self, key: bytes, ttl_seconds: float) -> bool:
        """Give the value under ``key`` so long to live (``inf``: for ever); whether it is there. The caller deletes it
        from lower tiers, which know no end."""
        with self._lock:
            now = self._clock()
            slot = self._live_slot(key, now)
            if slot is not None:
                self._lives.set(slot, now + ttl_seconds)
                self._saved[slot] &= LIFTED
            return slot is not None

    def delete(self, keys: Sequence[bytes]) -> list[bytes]:
        """Drop ``keys``; those that were present."""
        with self._lock:
            now = self._clock()
            dropped = []
            for key in keys:
                slot = self._live_slot(key, now)
                if slot is not None:
                    self._bury(slot)
                    dropped.append(key)
            return dropped

    def clear(self) -> None:
        """Drop everything that is published."""
        with self._lock:
            for slot in list(self._index.slot_of.values()):
                self._bury(slot, told=True)
            self.events.append(EventKind.CLEAR, DRAM)

    def sweep(self) -> int:
        """Drop what has outlived its time; how many values that were."""
        with self._lock:
            due = self._lives.over(self._index.top, self._clock())
            for slot in due:
                self._bury(slot)
            self._expirations += len(due)
            return len(due)

    def pin(self, keys: Sequence[bytes], seconds: float = math.inf) -> int | None:
        """Keep the values under ``keys`` from eviction for so long; how many of them are there, each counted once.

        None, and nothing more is pinned, when pinned values would come to more than half of the pool or of the items.
        """
        with self._lock:
            now = self._clock()
            slots = [slot for slot in self._live_slots(list(dict.fromkeys(keys))) if slot is not None]
            pages_of = {slot: self._pages(slot) for slot in slots}
            return len(slots) if self._pins.add(pages_of, now + seconds, now) else None

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Let the values under ``keys`` be evicted again; how many of them were pinned."""
        with self._lock:
            slots = {slot for slot in self._live_slots(keys) if slot is not None}
            return sum(self._pins.drop(slot) for slot in slots)

    # ---- lower tiers

    def lease_victim(self) -> int | None:
        """The value that would go next, leased until `drop_leased`, for saving it first; None when there is none, or
        enough memory is free or about to be. One that no tier may have goes at once."""
        with self._lock:
            while self._is_low(len(self._going), self._going_pages) and (
                (slot := self._policy.victim(self._may_go)) is not None
            ):
                if not self._lives.has_end(slot) and self.nbytes(slot):
                    self._leases[slot] = 1
                    self._going.add(slot)
                    self._going_pages += self._pages(slot)
                    return slot
                self._evict(slot)
            return None

    def lease_slot(self, key: bytes, unsaved_by: int) -> int | None:
        """The slot under ``key``, leased for saving it, if it is there and is to be saved."""
        with self._lock:
            slot = self._live_slot(key, self._clock())
            if slot is None or not self.wants_saving(slot, unsaved_by):
                return None
            self._leases[slot] = self._leases.get(slot, 0) + 1
            return slot

    def wants_saving(self, slot: int, unsaved_by: int) -> bool:
        """Whether one of these tiers lacks the value and may have it: values with a life of their own stay here."""
        return bool(unsaved_by & ~int(self._saved[slot])) and not self._lives.has_end(slot) and self.nbytes(slot) > 0

    def sights(self, slot: int) -> int:
        """How often the value was put (and, with ``counts_sights``, used), up to 255."""
        return int(self._sights[slot])

    def count_saved(self, bit: int) -> int:
        """How many values here are in a lower tier too."""
        with self._lock:
            column = self._saved[: self._index.top]
            return int(np.count_nonzero(column & bit))

    def put_here(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the value under each of ``keys`` is here since it was put, and not lifted; touches nothing."""
        with self._lock:
            return [slot is not None and self._saved[slot] < LIFTED for slot in self._live_slots(keys)]

    def present_quietly(self, keys: Sequence[bytes]) -> list[bool]:
        """As `present`, touching nothing."""
        with self._lock:
            return [slot is not None for slot in self._live_slots(keys)]

    def key_of(self, slot: int) -> bytes:
        """The key of a leased value."""
        return self._index.key_of(slot)

    def is_current(self, slot: int) -> bool:
        """Whether the leased value is still the one under its key, without an end to its life."""
        with self._lock:
            return slot not in self._buried and not self._lives.has_end(slot)

    def note_lost(self, slot: int, bits: int) -> None:
        """The tiers of ``bits`` do not have the leased value, or not any more."""
        with self._lock:
            self._saved[slot] &= 0xFF & ~bits

    def mark_saved(self, slot: int, bit: int, letter: bytes) -> bool:
        """A lower tier has the leased value now, which is told; unless it is no longer `is_current`: then False."""
        with self._lock:
            if slot in self._buried or self._lives.has_end(slot):
                return False
            self._saved[slot] |= bit
            self.events.append(EventKind.PUT, letter, self._index.key_of(slot))
            return True

    def drop_leased(self, slot: int) -> None:
        """End the lease of `lease_victim` and let the value go, unless it is wanted meanwhile."""
        with self._lock:
            self._going.discard(slot)
            self._going_pages -= self._pages(slot)
            if slot not in self._buried and self._leases.get(slot) == 1 and slot not in self._pins:
                self._evict(slot)
        self.release(slot)

    @property
    def is_low(self) -> bool:
        """Whether less than ``low_pages`` are free, or nearly as many values are held as may be."""
        return self._is_low()

    # ---- figures

    @property
    def max_pinned_bytes(self) -> int:
        """Bound of ``pinned_bytes``."""
        return self._pins.max_pages * PAGE_BYTES

    @property
    def max_pinned_items(self) -> int:
        """Bound of how many values are pinned."""
        return self._pins.max_items

    @property
    def pool(self) -> Pool:
        """The memory, for those who map it."""
        return self._places.pool

    def groups(self) -> dict[str, Share]:
        """What each sharing group has, by eight hexadecimal digits (zeros: none), or ``other``."""
        with self._lock:
            return self._payers.by_group()

    def namespaces(self) -> dict[str, Share]:
        """What each namespace has, by its name (empty: none), or ``other``."""
        with self._lock:
            return self._payers.by_namespace()

    def stats(self) -> TableStats:
        """Figures of this moment."""
        with self._lock:
            return TableStats(
                items=len(self._index),
                value_bytes=self._value_bytes,
                used_bytes=(self._places.pages - self._places.free_pages) * PAGE_BYTES,
                capacity_bytes=self._places.pages * PAGE_BYTES,
                uploading_bytes=self._uploading_pages * PAGE_BYTES,
                pinned_bytes=self._pins.pages * PAGE_BYTES,
                evictions=self._evictions,
                expirations=self._expirations,
                refused_uploads=self._refused_uploads,
            )

    def close(self) -> None:
        """Give the pool back. No other call may follow."""
        with self._lock:
            self._index.slot_of.clear()
            self._places.pool.close()

    # ---- internals, under the lock

    def _is_low(self, going: int = 0, going_pages: int = 0) -> bool:
        nearly_all = self._max_items - self._max_items // _ITEMS_SPARED
        few_pages = self._places.free_pages + going_pages < self.low_pages
        return few_pages or (self.low_pages > 0 and len(self._index) - going >= nearly_all)

    def _live_slot(self, key: bytes, now: float) -> int | None:
        slot = self._index.slot_of.get(key)
        if slot is not None and self._lives.any and self._lives.is_over(slot, now):
            self._bury(slot)
            self._expirations += 1
            return None
        return slot

    def _live_slots(self, keys: Sequence[bytes]) -> list[int | None]:
        if self._lives.any:
            now = self._clock()
            return [self._live_slot(key, now) for key in keys]
        return list(map(self._index.slot_of.get, keys))

    def _touch(self, slots: list[int]) -> None:
        self._policy.touched(slots)
        if self.counts_sights and slots:
            places = np.array(slots, np.int64)
            seen = self._sights[places]
            self._sights[places] = seen + (seen < 255)

    def _hold(
        self,
        key: bytes,
        upload: Upload,
        header: Header,
        now: float,
        ttl_seconds: float | None,
        pin: float | None,
        saved: int,
        sights: int,
    ) -> Published:
        nbytes = upload.nbytes
        payer = self._payers.charge(key, header.group, nbytes)
        fits = all(self._cut_down(excess) for excess in self._payers.excesses(payer, nbytes, self._index.top))
        while fits and len(self._index) >= self._max_items and self._evict_worst():
            pass
        slot = self._index.take(key) if fits and len(self._index) < self._max_items else None
        if slot is None:
            self._payers.refund(payer, nbytes)
            self._places.give_back(upload.runs)
            self._refused_uploads += 1
            return Published.NO_ROOM if fits else Published.OVER_QUOTA
        facts = self._index.facts
        facts.nbytes[slot] = nbytes
        facts.position[slot] = header.position
        facts.parent[slot] = header.parent
        facts.recompute_ns[slot] = min(header.recompute_ns, 2**63 - 1)
        self._places.settle(slot, upload.runs)
        self._payers.settle(slot, payer)
        self._value_bytes += nbytes
        self._saved[slot], self._sights[slot] = saved, sights
        self._lives.set(slot, now + ((self._rules.ttl_seconds or math.inf) if ttl_seconds is None else ttl_seconds))
        self._policy.added(slot)
        if pin is not None:
            self._pins.add({slot: self._pages(slot)}, pin, now)  # if it fits the bound as it is now
        self.events.append(EventKind.PUT, DRAM, key)
        self._tell_pressure()
        return Published.STORED

    def _tell_pressure(self) -> None:
        if self.on_pressure is not None and self._is_low(len(self._going), self._going_pages):
            self.on_pressure()

    def _cut_down(self, excess: Excess) -> bool:
        own = np.array([slot for slot in excess.slots.tolist() if self._may_go(slot)], np.int64)
        while own.size and excess.is_over:
            worst = self._policy.worst(own)
            own = own[own != worst]
            self._evict(worst)
        return excess.is_within_quota

    def _make_room(self, pages: int) -> bool:
        while self._places.free_pages < pages:
            if not self._evict_worst():
                return False
        return True

    def _evict_worst(self) -> bool:
        slot = self._policy.victim(self._may_go)
        if slot is None:
            return False
        self._evict(slot)
        return True

    def _may_go(self, slot: int) -> bool:
        return slot not in self._leases and not self._pins.holds(slot, self._clock())

    def _evict(self, slot: int) -> None:
        self._evictions += 1
        self._bury(slot, evicted=True)

    def _bury(self, slot: int, *, evicted: bool = False, told: bool = False) -> None:
        key, nbytes = self._index.key_of(slot), self.nbytes(slot)
        self._policy.removed(slot, evicted=evicted)
        self._index.hide(slot)
        self._value_bytes -= nbytes
        self._payers.remove(slot, nbytes)
        self._saved[slot] = 0
        self._lives.set(slot, math.inf)
        self._pins.drop(slot)
        if not told:
            self.events.append(EventKind.EVICT, DRAM, key)
        if slot in self._leases:
            self._buried.add(slot)
        else:
            self._free(slot)

    def _free(self, slot: int) -> None:
        self._places.clear(slot, self.nbytes(slot))
        self._index.give_back(slot)

    def _pages(self, slot: int) -> int:
        return pages_for(self.nbytes(slot))
