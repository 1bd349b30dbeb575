"""Fingerprints of chunks that went lately, so that one which comes back is known. Nothing else of them is kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvhearth.store.policies.lookup import Lookup


class Ghost:
    """The last fingerprints that were added, at most ``capacity``; about 16 bytes each."""

    def __init__(self, capacity: int) -> None:
        self._fingerprints: NDArray[np.uint64] = np.zeros(capacity, np.uint64)  # a ring; 0: taken out
        self._ring = self._fingerprints.data
        self._lookup = Lookup(self._fingerprints)
        self._capacity = capacity
        self._first = self._used = 0

    def add(self, fingerprint: int, at_most: int) -> None:
        """Remember a fingerprint, forgetting the oldest until there are no more than ``at_most`` (≥ 1) places taken."""
        self.take(fingerprint)
        while self._used >= min(at_most, self._capacity):
            self._forget_first()
        row = (self._first + self._used) % self._capacity
        self._ring[row] = fingerprint
        self._lookup.add(row)
        self._used += 1

    def take(self, fingerprint: int) -> bool:
        """Whether ``fingerprint`` is remembered; it is not from now on, though its place stays taken."""
        row = self._lookup.find(fingerprint)
        if row < 0:
            return False
        self._lookup.remove(row)
        self._ring[row] = 0
        return True

    def _forget_first(self) -> None:
        if self._ring[self._first]:
            self._lookup.remove(self._first)
            self._ring[self._first] = 0
        self._first = (self._first + 1) % self._capacity
        self._used -= 1
