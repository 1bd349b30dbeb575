"""Keys to values in the pool: least-recently-used eviction that spares pinned values, uploads invisible until whole,
leases while sending.

Thread-safe; every call is short. The bytes themselves are read and written by the callers, outside the lock, through
the views of an `Entry` that they hold: an upload's views belong to the uploader until `publish`, a leased entry's pages
are not reused until `release`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from kvhearth.store.allocator import PAGE_BYTES, PageAllocator, Run, pages_for
from kvhearth.store.groups import GroupShares, Share
from kvhearth.store.memory import Pool, Progress


class Entry:
    """A value's place in the pool. Owned by the table; callers only read ``nbytes`` and `Table.views`."""

    __slots__ = ("group_slot", "leases", "live", "nbytes", "pinned", "runs")

    def __init__(self, runs: tuple[Run, ...], nbytes: int) -> None:
        self.runs = runs
        self.nbytes = nbytes
        self.leases = 0
        self.live = False
        self.pinned = False
        self.group_slot = 0


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
    refused_uploads: int


class Table:
    """The values of one store.

    Args:
        capacity_bytes: memory for values, rounded down to whole pages.
        max_items: values held at once; bounds what keys and bookkeeping take beside the pool.
        progress: called while the pool is faulted in.

    Raises:
        UserError: the memory cannot be had.
    """

    def __init__(self, capacity_bytes: int, max_items: int, progress: Progress | None = None) -> None:
        pages = capacity_bytes // PAGE_BYTES
        self._pool = Pool(pages, progress)
        self._allocator = PageAllocator(pages)
        self._max_items = max_items
        # Uploads may take half of the pool, so that slow senders cannot drive out everything that is worth keeping.
        self._max_uploading_pages = pages // 2
        # Pins may take the other half: a value that may be uploaded then always finds room beside them.
        self._max_pinned_pages = pages // 2
        self._max_pinned_items = max_items // 2
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._value_bytes = 0
        self._uploading_pages = 0
        self._pinned_pages = 0
        self._pinned_items = 0
        self._groups = GroupShares()
        self._evictions = 0
        self._refused_uploads = 0

    def reserve(self, nbytes: int) -> Entry | None:
        """Memory for a value about to arrive, evicting as needed; None when there is none to be had now.

        The caller must end it with `publish` or `abandon`.
        """
        pages = pages_for(nbytes)
        with self._lock:
            if self._uploading_pages + pages > self._max_uploading_pages or not self._make_room(pages):
                self._refused_uploads += 1
                return None
            runs = self._allocator.allocate(pages)
            if runs is None:
                raise RuntimeError("room was made for an upload, yet there is none")
            self._uploading_pages += pages
            return Entry(runs, nbytes)

    def publish(self, key: bytes, entry: Entry, group: int = 0) -> bool:
        """Make a fully received value of a sharing group visible under ``key``, in place of any other.

        A pin on the key stays if the new value is within the bound. False, and the value is gone, when there are too
        many items and all of them are being sent or pinned.
        """
        with self._lock:
            self._uploading_pages -= pages_for(entry.nbytes)
            old = self._entries.pop(key, None)
            pin = old is not None and old.pinned
            if old is not None:
                self._bury(old)
            while len(self._entries) >= self._max_items and self._evict_oldest():
                pass
            if len(self._entries) >= self._max_items:
                self._allocator.release(entry.runs)
                self._refused_uploads += 1
                return False
            entry.live = True
            self._entries[key] = entry
            self._value_bytes += entry.nbytes
            entry.group_slot = self._groups.add(group, entry.nbytes)
            if pin and self._pinned_pages + pages_for(entry.nbytes) <= self._max_pinned_pages:
                self._set_pin(entry, True)
            return True

    def abandon(self, entry: Entry) -> None:
        """Give up an upload."""
        with self._lock:
            self._uploading_pages -= pages_for(entry.nbytes)
            self._allocator.release(entry.runs)

    def lease(self, key: bytes) -> Entry | None:
        """The value under ``key``, now most recently used; its bytes stay as they are until `release`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                entry.leases += 1
            return entry

    def release(self, entry: Entry) -> None:
        """End a lease."""
        with self._lock:
            entry.leases -= 1
            if not entry.live and not entry.leases:
                self._allocator.release(entry.runs)

    def views(self, entry: Entry) -> list[memoryview]:
        """The bytes of a leased entry or an upload, in order."""
        return self._pool.views(entry.runs, entry.nbytes)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` are present; they are touched last to first, so a chain loses its tail first."""
        with self._lock:
            matched = len(list(takewhile(self._entries.__contains__, keys)))
            for _ in map(self._entries.move_to_end, reversed(keys[:matched])):
                pass
            return matched

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each of ``keys`` is there; touched last to first, as by `match`."""
        with self._lock:
            found = [key in self._entries for key in keys]
            for key, there in zip(reversed(keys), reversed(found), strict=True):
                if there:
                    self._entries.move_to_end(key)
            return found

    def pin(self, keys: Sequence[bytes]) -> int | None:
        """Keep the values under ``keys`` from eviction; how many of them are there, each counted once.

        None, and nothing more is pinned, when pinned values would come to more than half of the pool or of the items.
        """
        with self._lock:
            there = [entry for key in dict.fromkeys(keys) if (entry := self._entries.get(key)) is not None]
            new = [entry for entry in there if not entry.pinned]
            pages = sum(pages_for(entry.nbytes) for entry in new)
            if (
                self._pinned_pages + pages > self._max_pinned_pages
                or self._pinned_items + len(new) > self._max_pinned_items
            ):
                return None
            for entry in new:
                self._set_pin(entry, True)
            return len(there)

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Let the values under ``keys`` be evicted again; how many of them were pinned."""
        with self._lock:
            entries = [self._entries.get(key) for key in dict.fromkeys(keys)]
            pinned = [entry for entry in entries if entry is not None and entry.pinned]
            for entry in pinned:
                self._set_pin(entry, False)
            return len(pinned)

    @property
    def max_pinned_bytes(self) -> int:
        """Bound of ``pinned_bytes``."""
        return self._max_pinned_pages * PAGE_BYTES

    @property
    def max_pinned_items(self) -> int:
        """Bound of how many values are pinned."""
        return self._max_pinned_items

    def groups(self) -> dict[str, Share]:
        """What each sharing group has, by the name that `GroupShares.by_name` gives it."""
        with self._lock:
            return self._groups.by_name()

    def exists(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys`` are present, counting repeats."""
        with self._lock:
            return sum(key in self._entries for key in keys)

    def length(self, key: bytes) -> int:
        """Bytes of the value under ``key``, 0 when absent."""
        with self._lock:
            entry = self._entries.get(key)
            return entry.nbytes if entry is not None else 0

    def delete(self, keys: Sequence[bytes]) -> int:
        """Drop ``keys``; how many were present."""
        with self._lock:
            dropped = [entry for key in keys if (entry := self._entries.pop(key, None)) is not None]
            for entry in dropped:
                self._bury(entry)
            return len(dropped)

    def clear(self) -> None:
        """Drop everything that is published."""
        with self._lock:
            for entry in self._entries.values():
                self._bury(entry)
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def stats(self) -> TableStats:
        """Figures of this moment."""
        with self._lock:
            return TableStats(
                items=len(self._entries),
                value_bytes=self._value_bytes,
                used_bytes=(self._allocator.pages - self._allocator.free_pages) * PAGE_BYTES,
                capacity_bytes=self._allocator.pages * PAGE_BYTES,
                uploading_bytes=self._uploading_pages * PAGE_BYTES,
                pinned_bytes=self._pinned_pages * PAGE_BYTES,
                evictions=self._evictions,
                refused_uploads=self._refused_uploads,
            )

    def close(self) -> None:
        """Give the pool back. No other call may follow."""
        with self._lock:
            self._entries.clear()
            self._pool.close()

    def _make_room(self, pages: int) -> bool:
        while self._allocator.free_pages < pages:
            if not self._evict_oldest():
                return False
        return True

    def _evict_oldest(self) -> bool:
        # A leased value gives no memory back yet, a pinned one is to stay: both count as just used when their turn
        # comes, so that the next search does not start with them again.
        for _ in range(len(self._entries)):
            key, entry = next(iter(self._entries.items()))
            if entry.leases or entry.pinned:
                self._entries.move_to_end(key)
                continue
            self._bury(self._entries.pop(key))
            self._evictions += 1
            return True
        return False

    def _bury(self, entry: Entry) -> None:
        entry.live = False
        self._value_bytes -= entry.nbytes
        self._groups.remove(entry.group_slot, entry.nbytes)
        if entry.pinned:
            self._set_pin(entry, False)
        if not entry.leases:
            self._allocator.release(entry.runs)

    def _set_pin(self, entry: Entry, pinned: bool) -> None:
        sign = 1 if pinned else -1
        entry.pinned = pinned
        self._pinned_pages += sign * pages_for(entry.nbytes)
        self._pinned_items += sign
