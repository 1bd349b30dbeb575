"""Which objects a bucket holds, as far as this node knows: from listings, and from its own puts. No I/O.

Several nodes share a bucket, so this is a picture that a listing renews: what another node put is known from the next
listing on, what another node deleted until then or until a read finds it gone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvhearth.store.tiers.bucket import Listed
from kvhearth.store.tiers.files import HEAD_BYTES
from kvhearth.store.tiers.port import Watcher, nobody

_WRITTEN_BITS = 40


class Known:
    """Lengths by key. Thread-safe; every call but `oldest` and `end_listing` is short. About 250 bytes an object.

    Args:
        max_items: most that are known at once; beyond, the one known longest is forgotten (its object stays).
        watcher: told of what listings find and miss, and of what is forgotten.
    """

    def __init__(self, max_items: int, watcher: Watcher = nobody) -> None:
        self._max_items = max_items
        self._watcher = watcher
        self._lock = threading.Lock()
        # One int a key, or two objects a key would double what it takes: length, Unix seconds, parity of the listing.
        self._packed: dict[bytes, int] = {}
        self._parity = 0
        self._epoch = 0
        self.value_bytes = 0
        self.key_bytes = 0

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the objects."""
        return self.value_bytes + self.key_bytes + len(self._packed) * HEAD_BYTES

    @property
    def epoch(self) -> int:
        """Changes with `clear`; see `listed`."""
        return self._epoch

    def keys(self) -> Iterator[bytes]:
        """Every key, as of now."""
        with self._lock:
            keys = list(self._packed)
        return iter(keys)

    def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of each value, 0 where none is known."""
        packed = self._packed
        with self._lock:
            return [packed.get(key, 0) >> _WRITTEN_BITS + 1 for key in keys]

    def __contains__(self, key: bytes) -> bool:
        return key in self._packed

    def add(self, item: Listed) -> None:
        """An object is there."""
        with self._lock:
            self._add(item)

    def remove(self, key: bytes) -> bool:
        """An object is not there (any more); whether it was known."""
        with self._lock:
            return self._drop(key)

    def clear(self) -> None:
        """Know nothing; listings that have begun are void."""
        with self._lock:
            self._packed = {}
            self.value_bytes = self.key_bytes = 0
            self._epoch += 1

    def begin_listing(self) -> int:
        """All objects are going to be told by `listed`; the epoch to tell them with."""
        with self._lock:
            self._parity ^= 1
            return self._epoch

    def listed(self, items: Iterable[Listed], epoch: int) -> bool:
        """These are there. False: the picture was cleared meanwhile."""
        with self._lock:
            if epoch != self._epoch:
                return False
            for item in items:
                if item.key not in self._packed:
                    self._watcher(item.key, True)
                self._add(item)
            return True

    def end_listing(self, epoch: int) -> bool:
        """All has been told: forget what was not. False: the picture was cleared meanwhile."""
        with self._lock:
            if epoch != self._epoch:
                return False
            for key in [key for key, packed in self._packed.items() if packed & 1 != self._parity]:
                self._drop(key)
                self._watcher(key, False)
            return True

    def oldest(self, nbytes: int) -> list[bytes]:
        """Keys of the oldest objects that take ``nbytes`` bytes together, or all."""
        with self._lock:
            keys = list(self._packed)
            packed = [self._packed[key] for key in keys]
        written = np.array([(item >> 1) % 2**_WRITTEN_BITS for item in packed], np.int64)
        chosen = []
        for index in np.argsort(written, kind="stable").tolist():
            if nbytes <= 0:
                break
            chosen.append(keys[index])
            nbytes -= (packed[index] >> _WRITTEN_BITS + 1) + len(keys[index]) + HEAD_BYTES
        return chosen

    def _add(self, item: Listed) -> None:
        old = self._packed.get(item.key)
        if old is not None:
            self.value_bytes -= old >> _WRITTEN_BITS + 1
        else:
            if len(self._packed) >= self._max_items:
                oldest = next(iter(self._packed))
                self._drop(oldest)
                self._watcher(oldest, False)
            self.key_bytes += len(item.key)
        self.value_bytes += item.nbytes
        written = min(item.written, 2**_WRITTEN_BITS - 1)
        self._packed[item.key] = (item.nbytes << _WRITTEN_BITS | written) << 1 | self._parity

    def _drop(self, key: bytes) -> bool:
        packed = self._packed.pop(key, None)
        if packed is None:
            return False
        self.value_bytes -= packed >> _WRITTEN_BITS + 1
        self.key_bytes -= len(key)
        return True
