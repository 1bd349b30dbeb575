"""Which keys are being changed and which values are on their way down, so that nothing of before a change comes back
from the tiers below. It moves nothing itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import xxhash

_STRIPES = 1024


class Crossings:
    """What is under way between DRAM and the tiers. Thread-safe; no call waits.

    A change is bracketed by `changing`: within, the value in DRAM goes first and those below after it. Meanwhile the
    key is neither lifted nor saved. A lift that began before is void (`is_current`), and a save that began before takes
    back what it wrote, as its value is no longer the one in DRAM; until it has, its key is not lifted (`is_saving`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions = [0] * _STRIPES
        self._changing: dict[bytes, int] = {}
        self._clearing = 0
        self._saving: set[tuple[bytes, int]] = set()

    @contextmanager
    def changing(self, keys: Sequence[bytes]) -> Iterator[None]:
        """Around a put or a deletion of ``keys``."""
        with self._lock:
            for key in keys:
                self._versions[_stripe(key)] += 1
                self._changing[key] = self._changing.get(key, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                for key in keys:
                    left = self._changing.pop(key) - 1
                    if left:
                        self._changing[key] = left

    @contextmanager
    def clearing(self) -> Iterator[None]:
        """Around a change of every key."""
        with self._lock:
            self._versions = [version + 1 for version in self._versions]
            self._clearing += 1
        try:
            yield
        finally:
            with self._lock:
                self._clearing -= 1

    def version(self, key: bytes) -> int | None:
        """For `is_current`, before a value is read from below; None while the key is being changed."""
        with self._lock:
            return None if self._clearing or key in self._changing else self._versions[_stripe(key)]

    def is_current(self, key: bytes, version: int) -> bool:
        """Whether the key has not been changed since (another key's change may say so too)."""
        return self._versions[_stripe(key)] == version

    def begin_save(self, key: bytes, tier: int) -> bool:
        """Whether a value may be saved now in the tier of this bit; if so, until `end_save`."""
        with self._lock:
            if self._clearing or key in self._changing or (key, tier) in self._saving:
                return False
            self._saving.add((key, tier))
            return True

    def end_save(self, key: bytes, tier: int) -> None:
        """A save is over, and what it wrote in vain has been deleted."""
        with self._lock:
            self._saving.discard((key, tier))

    def is_saving(self, key: bytes, tier: int) -> bool:
        """Whether what the tier of this bit has under ``key`` may be a value in the making. Such a value is in DRAM, or
        is none any more."""
        return (key, tier) in self._saving


def _stripe(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key) % _STRIPES
