"""Who pays for each slot: the namespace that its key begins with and the sharing group in its header. What they have is
counted in `shares`; what goes when one has too much is the table's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvhearth.store.dram.rules import Rules
from kvhearth.store.dram.shares import Share, Shares, namespace_of

_NOBODY = 2**16 - 1
_QUOTA_STEPS = 64


class Payer(NamedTuple):
    """The numbers of a namespace and a group."""

    namespace: int
    group: int


class Excess(NamedTuple):
    """A namespace or group over its quota, and the slots that it pays for."""

    shares: Shares
    number: int
    target_bytes: int
    """What to come down to: a little less than the quota where that is little, so that finding what belongs to it is
    not paid for each value."""
    slots: NDArray[np.int64]

    @property
    def is_over(self) -> bool:
        """Whether it still has more than it should come down to."""
        return self.shares.value_bytes(self.number) > self.target_bytes

    @property
    def is_within_quota(self) -> bool:
        """Whether it has no more than its quota."""
        return self.shares.value_bytes(self.number) <= self.shares.quota(self.number)


class Payers:
    """Namespaces and groups by slot. Not thread-safe."""

    def __init__(self, rules: Rules, slots: int) -> None:
        self.namespaces = Shares(rules.namespace_quota_bytes, rules.quotas)
        self.groups = Shares(rules.group_quota_bytes, rules.quotas)
        self._namespaces_of: NDArray[np.uint16] = np.zeros(slots, np.uint16)
        self._groups_of: NDArray[np.uint16] = np.zeros(slots, np.uint16)
        self._namespace_of, self._group_of = self._namespaces_of.data, self._groups_of.data  # quicker for one slot

    def charge(self, key: bytes, group: int, nbytes: int) -> Payer:
        """A value of ``nbytes`` bytes is coming: whoever pays for it has so much more, until `refund` or `remove`."""
        payer = Payer(self.namespaces.number(namespace_of(key)), self.groups.number(group))
        self.namespaces.add(payer.namespace, nbytes)
        self.groups.add(payer.group, nbytes)
        return payer

    def refund(self, payer: Payer, nbytes: int) -> None:
        """It did not come."""
        self.namespaces.remove(payer.namespace, nbytes)
        self.groups.remove(payer.group, nbytes)

    def settle(self, slot: int, payer: Payer) -> None:
        """It came, into ``slot``."""
        self._namespace_of[slot], self._group_of[slot] = payer

    def remove(self, slot: int, nbytes: int) -> None:
        """The value in ``slot`` is gone."""
        self.refund(Payer(self._namespace_of[slot], self._group_of[slot]), nbytes)
        self._namespace_of[slot] = self._group_of[slot] = _NOBODY

    def excesses(self, payer: Payer, nbytes: int, top: int) -> Iterator[Excess]:
        """Where ``payer`` is over a quota with a value of ``nbytes`` bytes; slots are below ``top``."""
        for shares, number, column in (
            (self.namespaces, payer.namespace, self._namespaces_of),
            (self.groups, payer.group, self._groups_of),
        ):
            quota = shares.quota(number)
            if quota and shares.value_bytes(number) > quota:
                spare = quota // _QUOTA_STEPS
                own = np.flatnonzero(column[:top] == number) if nbytes <= quota else np.empty(0, np.int64)
                yield Excess(shares, number, quota - spare if spare > nbytes else quota, own)

    def by_namespace(self) -> dict[str, Share]:
        """What each namespace has, by its name (empty: none), or ``other``."""
        found = self.namespaces.by_name()
        return {_text(name): share for name, share in found.items()}

    def by_group(self) -> dict[str, Share]:
        """What each sharing group has, by eight hexadecimal digits (zeros: none), or ``other``."""
        return {"other" if n is None else f"{n:08x}": share for n, share in self.groups.by_name().items()}


def _text(name: object) -> str:
    return name.decode("ascii", "backslashreplace") if isinstance(name, bytes) else "other"
