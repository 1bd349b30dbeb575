"""Which held chunks are followed by other held chunks, so that a policy can spare a head while its tail is there. It
ranks nothing.

A chunk follows the held chunk whose fingerprint is its ``parent`` and whose place is one before its own. Where the
putter named a parent by something else than the fingerprint of its key, chunks stand alone and recency orders them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvhearth.store.policies.facts import Facts
from kvhearth.store.policies.lookup import Lookup

AWAITED_AT_MOST = 65_536
"""Parents that are not held whose followers are counted; past this, followers of further ones stand alone."""

EVICTED_KNOWN = 1024
"""So many evicted chunks are known, so that one that arrives behind them, of a prompt longer than the store, is of use
to nobody."""


class Chains:
    """Counts followers.

    Attributes:
        followers: uint32 by slot, how many held chunks follow this one; to be read only.
    """

    def __init__(self, facts: Facts) -> None:
        self.followers: NDArray[np.uint32] = np.zeros(facts.capacity, np.uint32)
        self._followers = self.followers.data
        self._facts = facts
        self._lookup = Lookup(facts.fingerprint)
        self._fingerprint = facts.fingerprint.data
        self._parent = facts.parent.data
        self._position = facts.position.data
        # (fingerprint, position) of a chunk that is not held -> held chunks that follow it: puts may arrive out of
        # order, and a chunk may be deleted from the middle of its chain.
        self._awaited: dict[tuple[int, int], int] = {}
        self._evicted: OrderedDict[int, None] = OrderedDict()

    def added(self, slot: int) -> bool:
        """``slot`` is held now. True when it is of no use: its parent has just been evicted."""
        fingerprint, position = self._fingerprint[slot], self._position[slot]
        self._lookup.add(slot)
        self._followers[slot] = self._awaited.pop((fingerprint, position), 0) if self._awaited else 0
        if not position:
            return False
        parent = self._parent[slot]
        above = self._find(parent, position - 1)
        if above >= 0:
            self._followers[above] += 1
            return False
        self._await(parent, position - 1, 1)
        return parent in self._evicted

    def removed(self, slot: int, *, evicted: bool) -> int:
        """``slot`` is held no more. The slot of its parent if that has no follower left by this, else -1."""
        self._lookup.remove(slot)
        if evicted:
            self._evicted[self._fingerprint[slot]] = None
            if len(self._evicted) > EVICTED_KNOWN:
                self._evicted.popitem(last=False)
        position = self._position[slot]
        if followers := self._followers[slot]:
            self._followers[slot] = 0
            self._await(self._fingerprint[slot], position, followers)
        if not position:
            return -1
        parent = self._parent[slot]
        above = self._find(parent, position - 1)
        if above < 0:
            self._await(parent, position - 1, -1)
            return -1
        left: int = self._followers[above]
        if not left:  # it was never counted: too many were awaited
            return -1
        self._followers[above] = left - 1
        return above if left == 1 else -1

    def is_followed(self, slot: int) -> bool:
        """Whether a held chunk follows the one in ``slot``."""
        return bool(self._followers[slot])

    def first_to_go(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of ``slots`` that nothing follows or, where there are none, those deepest in their chains."""
        ends: NDArray[np.int64] = slots[self.followers[slots] == 0]
        if len(ends):
            return ends
        places = self._facts.position[slots]
        deepest: NDArray[np.int64] = slots[places == places.max()]
        return deepest

    def last_resort(self, may_go: Callable[[int], bool]) -> int | None:
        """Of the held chunks that others follow, the deepest that may go: for when nothing may that none follows."""
        slots = np.flatnonzero(self.followers)
        deepest_first = slots[np.argsort(-self._facts.position[slots].astype(np.int64), kind="stable")]
        return next(filter(may_go, deepest_first.tolist()), None)

    def _find(self, fingerprint: int, position: int) -> int:
        # Positions that must differ by one keep made-up parents from forming a circle, in which none could ever go.
        slot = self._lookup.find(fingerprint)
        return slot if slot >= 0 and self._position[slot] == position else -1

    def _await(self, fingerprint: int, position: int, change: int) -> None:
        key = fingerprint, position
        count = self._awaited.get(key)
        if count is None:
            if change > 0 and len(self._awaited) < AWAITED_AT_MOST:
                self._awaited[key] = change
        elif count + change > 0:
            self._awaited[key] = count + change
        else:
            del self._awaited[key]
