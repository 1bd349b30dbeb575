"""A policy that is told of uses late: many at once cost little more than one, and nothing depends on them until the
next chunk comes or goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvhearth.store.policies.port import Policy

_MOST_LATE = 1024


class Late:
    """The same `Policy`, to which `touched` is handed on in batches, in order. What is used twice within a batch counts
    as the policy counts a slot that it is given twice."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._slots: list[int] = []

    def added(self, slot: int) -> None:
        """See `Policy`."""
        self._hand_on()
        self._policy.added(slot)

    def touched(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """See `Policy`."""
        self._slots.extend(slots)
        if len(self._slots) >= _MOST_LATE:
            self._hand_on()

    def removed(self, slot: int, *, evicted: bool) -> None:
        """See `Policy`."""
        self._hand_on()
        self._policy.removed(slot, evicted=evicted)

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        """See `Policy`."""
        self._hand_on()
        return self._policy.victim(may_go)

    def worst(self, slots: NDArray[np.int64]) -> int:
        """See `Policy`."""
        self._hand_on()
        return self._policy.worst(slots)

    def _hand_on(self) -> None:
        if self._slots:
            slots, self._slots = self._slots, []
            self._policy.touched(slots)
