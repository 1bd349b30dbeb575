"""The contract of an eviction policy: it is told what happens to slots and names the next to go. It removes nothing
itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Policy(Protocol):
    """Pure, clockless and deterministic. Not thread-safe: its owner calls it under one lock.

    A slot is held from `added` to `removed`; `added` is called once in between. Time is the order of the calls.
    """

    def added(self, slot: int) -> None:
        """A chunk is now held in ``slot``; its row of `Facts` has been written. A chain is added head first."""

    def touched(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """The chunks in ``slots``, all held, were used. A chain comes tail first: its head is the most recent."""

    def removed(self, slot: int, *, evicted: bool) -> None:
        """``slot`` is held no more. ``evicted``: for want of room, so that a policy may remember it; else deleted.

        Its row of `Facts` is still what it was when it was added.
        """

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        """The worst held slot for which ``may_go`` is true; None when there is none. It stays held until `removed`."""

    def worst(self, slots: NDArray[np.int64]) -> int:
        """The one to go first of these held slots, shape (n,) with n >= 1; for quotas."""
