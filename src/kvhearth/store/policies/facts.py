"""What an eviction policy may know of each held chunk: numpy columns by slot. Written by the index, read by policies;
it decides nothing.

A slot is an int below the capacity; it is reused after its chunk has gone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Facts:
    """Columns of length ``capacity``. The owner writes a slot's row before it calls `Policy.added`.

    Attributes:
        nbytes: uint32, bytes of the value.
        position: uint32, place in its chain, 0 for the head (and for a value without a chain).
        parent: uint64, fingerprint of the chunk before it; 0 for the head.
        recompute_ns: int64, what computing it again would take, in nanoseconds; 0 when the putter did not say.
        fingerprint: uint64, xxh3-64 of the key, never 0.
    """

    __slots__ = ("capacity", "fingerprint", "nbytes", "parent", "position", "recompute_ns")

    def __init__(self, capacity: int) -> None:
        # Zeros are virtual memory: a page becomes real when the first of its slots is used.
        self.capacity = capacity
        self.nbytes: NDArray[np.uint32] = np.zeros(capacity, np.uint32)
        self.position: NDArray[np.uint32] = np.zeros(capacity, np.uint32)
        self.parent: NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        self.recompute_ns: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.fingerprint: NDArray[np.uint64] = np.zeros(capacity, np.uint64)
