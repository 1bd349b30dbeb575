"""Which slots have an end, and when."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


class Lives:
    """Ends by slot, in monotonic seconds. Not thread-safe.

    Args:
        slots: how many there may be.
    """

    def __init__(self, slots: int) -> None:
        self._ends: NDArray[np.float64] = np.zeros(slots, np.float64)
        self._end = self._ends.data  # quicker for one slot
        self._count = 0

    @property
    def any(self) -> bool:
        """Whether any slot has an end: while none has, nobody needs to look."""
        return self._count > 0

    def set(self, slot: int, end: float) -> None:
        """Give a slot an end; ``inf``: none."""
        value = end if end < math.inf else 0.0
        had = self._end[slot]
        if value or had:
            self._count += (value > 0) - bool(had)
            self._ends[slot] = value

    def end(self, slot: int) -> float:
        """When a slot ends; ``inf``: never."""
        return self._end[slot] or math.inf

    def has_end(self, slot: int) -> bool:
        """Whether a slot ends at all."""
        return bool(self._end[slot])

    def is_over(self, slot: int, now: float) -> bool:
        """Whether a slot has outlived its time."""
        return 0 < self._end[slot] <= now

    def over(self, top: int, now: float) -> list[int]:
        """The slots below ``top`` that have."""
        if not self._count:
            return []
        ends = self._ends[:top]
        return [int(slot) for slot in np.flatnonzero((ends > 0) & (ends <= now))]
