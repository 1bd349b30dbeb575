"""Which values a disk tier holds, in memory: keys, facts by slot, the order of eviction, and the bounds on bytes and
files. No I/O; the files are its owner's business.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvhearth.store.policies import make_policy
from kvhearth.store.policies.facts import Facts
from kvhearth.store.tiers.files import file_bytes
from kvhearth.store.tiers.names import Entry
from kvhearth.store.tiers.port import Watcher, nobody

_BATCH = 1000


class Catalog:
    """Entries by key. Thread-safe; every call is short. About 300 bytes a value: its key, a dict's place, a slot's row.

    Args:
        capacity_bytes: bound of the files' bytes, heads and keys included.
        max_files: bound of their number.
        policy: name of the eviction policy.
        watcher: told of what is evicted, found, and found gone.

    Raises:
        UserError: there is no such policy.
    """

    def __init__(self, capacity_bytes: int, max_files: int, policy: str, watcher: Watcher = nobody) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_files = max_files
        self._policy_name = policy
        self._watcher = watcher
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._facts = Facts(self.max_files)
        self._policy = make_policy(self._policy_name, self._facts, self.capacity_bytes)
        self._slots: dict[bytes, int] = {}
        self._keys: list[bytes] = []
        self._free: list[int] = []
        self._written: NDArray[np.uint64] = np.zeros(self.max_files, np.uint64)
        self._round: NDArray[np.uint8] = np.zeros(self.max_files, np.uint8)
        self._used: NDArray[np.bool_] = np.zeros(self.max_files, np.bool_)
        self._now_round = 0
        self._searching = False
        self.value_bytes = 0
        self.stored_bytes = 0
        self._coming_bytes = 0
        self._coming = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def keys(self) -> Iterator[bytes]:
        """Every key, as of now."""
        with self._lock:
            keys = list(self._slots)
        return iter(keys)

    def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of each value, 0 where there is none. ``keys``, a chain head first, count as used.

        A chunk that is asked for alone does not, unless it heads its chain: a chain that is read chunk by chunk would
        end with its tail the most recent, and its head would go first.
        """
        with self._lock:
            slots = [self._slots.get(key, -1) for key in keys]
            found = list(dict.fromkeys(slot for slot in reversed(slots) if slot >= 0))
            if found and (len(keys) > 1 or not self._facts.position[found[0]]):
                self._policy.touched(found)
                if self._searching:
                    self._used[found] = True
            sizes = iter(self._facts.nbytes[[slot for slot in slots if slot >= 0]].tolist())
        return [next(sizes) if slot >= 0 else 0 for slot in slots]

    def get(self, key: bytes) -> Entry | None:
        """The entry of ``key``."""
        with self._lock:
            slot = self._slots.get(key)
            return None if slot is None else self._entry(slot)

    def some(self) -> Entry | None:
        """Any entry."""
        with self._lock:
            slot = next(iter(self._slots.values()), None)
            return None if slot is None else self._entry(slot)

    def reserve(self, nbytes: int) -> list[Entry] | None:
        """Room for a file of ``nbytes`` bytes that is about to be written, until `add` or `unreserve`.

        Returns:
            What had to go for it, to be deleted by the caller; None when there is no room to be had.
        """
        with self._lock:
            gone = self._make_room(nbytes)
            if self._has_room(nbytes):
                self._coming_bytes += nbytes
                self._coming += 1
                return gone
            for entry in gone:
                self._add(entry)
                self._watcher(entry.key, True)
            return None

    def unreserve(self, nbytes: int) -> None:
        """Give up a reservation."""
        with self._lock:
            self._coming_bytes -= nbytes
            self._coming -= 1

    def add(self, entry: Entry) -> None:
        """The file of ``entry`` is written; takes its reservation."""
        with self._lock:
            self._coming_bytes -= _file_bytes(entry)
            self._coming -= 1
            self._drop(entry.key, evicted=False)
            self._add(entry)

    def remove(self, key: bytes) -> Entry | None:
        """Forget ``key``; what it was."""
        with self._lock:
            return self._drop(key, evicted=False)

    def remove_same(self, entry: Entry) -> bool:
        """Forget ``entry`` unless another value has come in its place."""
        with self._lock:
            slot = self._slots.get(entry.key)
            if slot is None or self._entry(slot) != entry:
                return False
            self._drop(entry.key, evicted=False)
            self._watcher(entry.key, False)
            return True

    def evict(self, nbytes: int) -> list[Entry]:
        """Drop the worst until files of ``nbytes`` bytes in all have gone, or none is left."""
        with self._lock:
            gone: list[Entry] = []
            while nbytes > 0 and (entry := self._evict_one()) is not None:
                gone.append(entry)
                nbytes -= _file_bytes(entry)
            return gone

    def clear(self, *, tell: bool = False) -> None:
        """Forget everything; reservations stay. ``tell``: the watcher too, value by value."""
        with self._lock:
            for key in self._slots if tell else ():
                self._watcher(key, False)
            coming = (self._coming_bytes, self._coming)
            self._reset()
            self._coming_bytes, self._coming = coming

    def begin_search(self) -> None:
        """All files are going to be found again; see `found` and `end_search`."""
        with self._lock:
            self._now_round = (self._now_round + 1) % 256
            self._searching = True
            self._used[:] = False

    def found(self, entries: Iterable[Entry]) -> list[Entry]:
        """Files that lie there; may repeat.

        Returns:
            Those that should not: second files of a key, and what there is no room for. The caller deletes them.
        """
        surplus: list[Entry] = []
        with self._lock:
            for entry in entries:
                slot = self._slots.get(entry.key)
                if slot is None:
                    nbytes = _file_bytes(entry)
                    if not self._has_room(nbytes):
                        surplus += self._make_room(nbytes)
                    if self._has_room(nbytes):
                        self._add(entry)
                        self._watcher(entry.key, True)
                    else:
                        surplus.append(entry)
                elif self._entry(slot) == entry:
                    self._round[slot] = self._now_round
                else:
                    surplus.append(entry)
        return surplus

    def end_search(self) -> None:
        """All has been found: forget what was not there, and put the rest in order of use, as far as that is known."""
        with self._lock:
            slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
            there = self._round[slots] == self._now_round
            ghosts = [self._keys[slot] for slot in slots[~there].tolist()]
            slots = slots[there]
            # Oldest first; of one second the tail before the head; last, what was asked for during the search.
            position = self._facts.position[slots].astype(np.int64)
            seconds = self._written[slots] // 1_000_000
            order = np.lexsort((-position, seconds, self._used[slots]))
            ordered = [self._keys[slot] for slot in slots[order].tolist()]
            self._searching = False
        # In batches, so that nobody who asks waits for all of it.
        for batch in _batches(ghosts):
            with self._lock:
                for key in batch:
                    slot = self._slots.get(key)
                    if slot is not None and self._round[slot] != self._now_round:
                        self._drop(key, evicted=False)
                        self._watcher(key, False)
        for batch in _batches(ordered):
            with self._lock:
                self._policy.touched([slot for key in batch if (slot := self._slots.get(key)) is not None])

    def _entry(self, slot: int) -> Entry:
        facts = self._facts
        return Entry(
            self._keys[slot],
            int(facts.nbytes[slot]),
            int(facts.position[slot]),
            int(facts.parent[slot]),
            int(facts.recompute_ns[slot]),
            int(self._written[slot]),
        )

    def _has_room(self, nbytes: int) -> bool:
        fits = self.stored_bytes + self._coming_bytes + nbytes <= self.capacity_bytes
        return fits and len(self._slots) + self._coming < self.max_files

    def _make_room(self, nbytes: int) -> list[Entry]:
        gone: list[Entry] = []
        while not self._has_room(nbytes) and (entry := self._evict_one()) is not None:
            gone.append(entry)
        return gone

    def _evict_one(self) -> Entry | None:
        slot = self._policy.victim(_any)
        if slot is None:
            return None
        key = self._keys[slot]
        self._watcher(key, False)
        return self._drop(key, evicted=True)

    def _add(self, entry: Entry) -> None:
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = entry.key
        else:
            slot = len(self._keys)
            self._keys.append(entry.key)
        facts = self._facts
        facts.nbytes[slot] = entry.nbytes
        facts.position[slot] = entry.position
        facts.parent[slot] = entry.parent
        facts.recompute_ns[slot] = entry.recompute_ns
        facts.fingerprint[slot] = xxhash.xxh3_64_intdigest(entry.key) or 1
        self._written[slot] = entry.written
        self._round[slot] = self._now_round
        self._used[slot] = False
        self._slots[entry.key] = slot
        self.value_bytes += entry.nbytes
        self.stored_bytes += _file_bytes(entry)
        self._policy.added(slot)

    def _drop(self, key: bytes, *, evicted: bool) -> Entry | None:
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        entry = self._entry(slot)
        self._policy.removed(slot, evicted=evicted)
        self._keys[slot] = b""
        self._free.append(slot)
        self.value_bytes -= entry.nbytes
        self.stored_bytes -= _file_bytes(entry)
        return entry


def _batches(keys: list[bytes]) -> Iterator[list[bytes]]:
    return (keys[first : first + _BATCH] for first in range(0, len(keys), _BATCH))


def _any(slot: int) -> bool:
    return True


def _file_bytes(entry: Entry) -> int:
    return file_bytes(entry.key, entry.nbytes)
