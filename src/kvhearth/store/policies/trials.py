"""Tries several patiences of `kv_aware` on a sample of the chunks, to learn which would hit most. Holds no chunk and
knows no slots.

One chunk in ``2**shift`` is watched, chosen by its fingerprint, in caches as much smaller than the store
(C. Waldspurger et al., "Cache modeling and optimization using miniature simulations", USENIX ATC 2017).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PATIENCES = (1, 2, 4, 16, 256)
"""How many times faster a chunk ages that was never used again; 1 is plain recency."""

MINIATURE = 2048
"""Chunks that a miniature holds at least, where the store holds so many, and at most twice that."""

LEAST_SHIFT = 2
"""At most one chunk in four is watched, which bounds what the trials cost a small store."""

LEAST_CAPACITY = 256
"""Chunks in a miniature from which on it is believed; smaller stores use plain recency."""

_LEAST_GAIN = 0.02  # of the hits of plain recency
_DEVIATIONS = 3.0  # of a gain's mean that it must be above nothing
_LEAST_EPOCHS = 4
_REMEMBERED = 0.95  # of the weight of an epoch when the next one ends


class Trials:
    """Attributes:
    patience: the one of `PATIENCES` to use now.
    """

    def __init__(self) -> None:
        self.patience = 1
        self._shift = -1
        self._start(0)

    def resize(self, held: int) -> int:
        """Tell how many chunks the store holds (≥ 1); how many low bits of a watched chunk's hash must be zero."""
        shift = max(LEAST_SHIFT, (held // MINIATURE).bit_length() - 1)
        if shift != self._shift:
            self._shift = shift
            self._start(held >> shift)
        for miniature in self._miniatures:
            miniature.capacity = max(1, held >> shift)
        return shift

    def used(self, fingerprints: Sequence[int]) -> bool:
        """Watched chunks were looked for or put, in this order. True when `patience` was judged anew."""
        for number, miniature in enumerate(self._miniatures):
            self._hits[number] += miniature.play(fingerprints)
        self._uses += len(fingerprints)
        if self._uses < self._epoch:
            return False
        self._judge()
        return True

    def _start(self, capacity: int) -> None:
        self._miniatures = [_Miniature(patience, max(1, capacity)) for patience in PATIENCES]
        self._hits = [0] * len(PATIENCES)  # of this epoch
        self._weight = 0.0  # epochs, the recent ones counting most
        self._base = 0.0
        self._gains: NDArray[np.float64] = np.zeros(len(PATIENCES) - 1)
        self._squares: NDArray[np.float64] = np.zeros(len(PATIENCES) - 1)
        self._uses = 0
        self._epoch = max(256, capacity // 2)

    def _judge(self) -> None:
        gains = np.array(self._hits[1:], np.float64) - self._hits[0]
        self._weight = _REMEMBERED * self._weight + 1
        self._base = _REMEMBERED * self._base + self._hits[0]
        self._gains = _REMEMBERED * self._gains + gains
        self._squares = _REMEMBERED * self._squares + gains**2
        self._hits = [0] * len(PATIENCES)
        self._uses = 0
        if self._weight < _LEAST_EPOCHS or self._miniatures[0].capacity < LEAST_CAPACITY:
            self.patience = PATIENCES[0]
            return
        # Whole prompts hit or miss together, so what luck may do is told by how the gain differs between epochs.
        mean = self._gains / self._weight
        variance = np.maximum(self._squares / self._weight - mean**2, 0)
        sure = mean - _DEVIATIONS * np.sqrt(variance / self._weight)
        best = int(sure.argmax())
        gains_enough = sure[best] > _LEAST_GAIN * self._base / self._weight
        self.patience = PATIENCES[1 + best] if gains_enough else PATIENCES[0]


class _Miniature:
    """`KvAware` without chains, costs and bytes."""

    def __init__(self, patience: int, capacity: int) -> None:
        self.capacity = capacity
        self._patience = patience
        self._new: OrderedDict[int, int] = OrderedDict()  # fingerprint -> time of its last use
        self._proven: OrderedDict[int, int] = OrderedDict()
        self._gone: OrderedDict[int, None] = OrderedDict()
        self._now = 0

    def play(self, fingerprints: Sequence[int]) -> int:
        """Use chunks one after another; how many were held."""
        hits = 0
        new, proven, gone, now = self._new, self._proven, self._gone, self._now
        for fingerprint in fingerprints:
            now += 1
            if proven.pop(fingerprint, None) is not None or new.pop(fingerprint, None) is not None:
                hits += 1
                proven[fingerprint] = now
                continue
            while len(new) + len(proven) >= self.capacity:
                self._evict(now)
            if fingerprint in gone:
                del gone[fingerprint]
                proven[fingerprint] = now
            else:
                new[fingerprint] = now
        self._now = now
        return hits

    def _evict(self, now: int) -> None:
        new, proven = self._new, self._proven
        newer = now - next(iter(new.values())) if new else 0
        older = now - next(iter(proven.values())) if proven else 0
        loses = new if new and (not proven or newer * self._patience >= older) else proven
        fingerprint, _ = loses.popitem(last=False)
        self._gone[fingerprint] = None
        if len(self._gone) > self.capacity:
            self._gone.popitem(last=False)
