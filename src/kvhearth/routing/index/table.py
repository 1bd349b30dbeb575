"""A map of 64-bit integers to 64-bit integers in order of insertion, in some 22 to 40 bytes an entry where a dict takes
100 to 200. It is laid out as CPython's dict: slots point into dense entries. No iteration safe under change.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

_LEAST_SLOTS = 16


class HashTable:
    """Engine hash → own key. Hashes are in [0, 2**64) and spread evenly, keys in [1, 2**64); 0 means none.

    A removed entry stays as a hole (key 0) until the table is laid out anew, which happens when its dense part is full
    or a third of it is holes; so every operation takes constant time but for that, which numpy does (some 100 ns an
    entry).
    """

    __slots__ = ("_hashes", "_head", "_keys", "_live", "_mask", "_room", "_slots")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._hashes = array("Q")
        self._keys = array("Q")
        self._live = 0
        self._head = 0
        self._lay_slots(_LEAST_SLOTS)

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, spare room not counted (array grows by a sixteenth)."""
        return 4 * len(self._slots) + 16 * len(self._hashes)

    def get(self, hash_: int) -> int:
        """Key of the hash, or 0."""
        slots, hashes, mask = self._slots, self._hashes, self._mask
        at = hash_ & mask
        while entry := slots[at]:
            if hashes[entry - 1] == hash_ and (key := self._keys[entry - 1]):
                return key
            at = (at + 1) & mask
        return 0

    def add(self, hash_: int, key: int) -> int:
        """Map hash to key as the newest entry, unless it is mapped: then its key is returned and stays. 0 = added."""
        slots, hashes, mask = self._slots, self._hashes, self._mask
        at = hash_ & mask
        while entry := slots[at]:
            if hashes[entry - 1] == hash_ and (known := self._keys[entry - 1]):
                return known
            at = (at + 1) & mask
        hashes.append(hash_)
        self._keys.append(key)
        slots[at] = len(hashes)
        self._live += 1
        used = len(hashes)
        if used >= self._room or used - self._live > self._live // 2 + _LEAST_SLOTS:
            self._lay_out()
        return 0

    def pop(self, hash_: int) -> int:
        """Remove the hash; its key, or 0 if it was not there."""
        slots, hashes, mask = self._slots, self._hashes, self._mask
        at = hash_ & mask
        while entry := slots[at]:
            if hashes[entry - 1] == hash_ and (key := self._keys[entry - 1]):
                self._keys[entry - 1] = 0
                self._live -= 1
                if self._live * 4 + 2 * _LEAST_SLOTS < len(hashes):
                    self._lay_out()
                return key
            at = (at + 1) & mask
        return 0

    def pop_oldest(self) -> tuple[int, int]:
        """Remove the entry added first: hash and key.

        Raises:
            KeyError: the table is empty.
        """
        if not self._live:
            raise KeyError("the table is empty")
        keys, head = self._keys, self._head
        while not keys[head]:
            head += 1
        self._head = head + 1
        key, keys[head] = keys[head], 0
        self._live -= 1
        return self._hashes[head], key

    def items(self) -> Iterator[tuple[int, int]]:
        """Hash and key, oldest first."""
        return ((hash_, key) for hash_, key in zip(self._hashes, self._keys, strict=True) if key)

    def _lay_slots(self, slots: int) -> None:
        self._slots = array("I", bytes(4 * slots))
        self._mask = slots - 1
        self._room = slots * 2 // 3

    def _lay_out(self) -> None:
        """Close the holes and give the entries slots anew: twice as many if more than three quarters of the room are
        in use, fewer if less than a quarter is."""
        slots = self._mask + 1
        if self._live * 4 > self._room * 3:
            slots *= 2
        while slots > _LEAST_SLOTS and self._live * 4 < slots * 2 // 3:
            slots //= 2
        keys = np.frombuffer(self._keys, np.uint64)
        live = keys != 0
        hashes = np.frombuffer(self._hashes, np.uint64)[live]
        self._keys, self._hashes = array("Q", keys[live].tobytes()), array("Q", hashes.tobytes())
        self._head = 0
        self._lay_slots(slots)
        # Linear probing for all at once: sorted by home, each takes its home or the slot after its forerunner.
        home = (hashes & np.uint64(slots - 1)).astype(np.int64)
        order = np.argsort(home, kind="stable")
        step = np.arange(len(order))
        place = np.maximum.accumulate(home[order] - step) + step
        fits = place < slots
        table = np.zeros(slots, np.uint32)
        table[place[fits]] = order[fits] + 1
        self._slots = array("I", table.tobytes())
        for entry in order[~fits].tolist():  # those that wrap round at the end
            at = 0
            while self._slots[at]:
                at += 1
            self._slots[at] = entry + 1
