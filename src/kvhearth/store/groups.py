"""What each sharing group has in the store: bytes and values. Counts only; keeps nobody within a quota."""

from __future__ import annotations

from typing import NamedTuple

MAX_GROUPS = 64
"""Groups told apart at once; whatever comes beyond them is counted together, so that made-up groups cost nothing."""

_OTHER = -1


class Share(NamedTuple):
    """What one group has in the store."""

    value_bytes: int
    values: int


class GroupShares:
    """Bytes and values by group. Not thread-safe.

    A group is told apart while it has values; one that came when there were `MAX_GROUPS` is counted under ``other``
    until its values go, even if a place has become free.
    """

    def __init__(self) -> None:
        self._shares: dict[int, list[int]] = {}

    def add(self, group: int, nbytes: int) -> int:
        """One more value of ``group``; the slot it was counted under, for `remove`."""
        full = len(self._shares) - (_OTHER in self._shares) >= MAX_GROUPS
        slot = group if group in self._shares or not full else _OTHER
        share = self._shares.setdefault(slot, [0, 0])
        share[0] += nbytes
        share[1] += 1
        return slot

    def remove(self, slot: int, nbytes: int) -> None:
        """A value that was counted under ``slot`` is gone."""
        share = self._shares[slot]
        share[0] -= nbytes
        share[1] -= 1
        if not share[1]:
            del self._shares[slot]

    def by_name(self) -> dict[str, Share]:
        """Eight hexadecimal digits of the group (zeros: none), or ``other``; at most `MAX_GROUPS` + 1 of them."""
        return {"other" if slot == _OTHER else f"{slot:08x}": Share(*share) for slot, share in self._shares.items()}
