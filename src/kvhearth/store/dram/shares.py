"""What each namespace and each sharing group has in the store: bytes, values, and the quota it stays within."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

MAX_SHARES = 4096
"""Shares told apart at once; whatever comes beyond them is counted together, so that made-up names cost nothing."""

SHOWN = 64
"""Shares shown by name in figures, those with the most bytes; the rest are shown together."""

OTHER = 0


class Share(NamedTuple):
    """What one namespace or group has in the store."""

    value_bytes: int
    values: int


class Shares:
    """Bytes and values by name (a namespace or a group). Not thread-safe.

    A name is told apart while it has values; one that came when there were `MAX_SHARES` is counted under ``other``
    until its values go, even if a place has become free.

    Args:
        quota_bytes: bound of each share with a name; 0 for none. What is counted under ``other`` shares one.
        quotas: bounds of their own, by name.
    """

    def __init__(self, quota_bytes: int = 0, quotas: Mapping[Any, int] | None = None) -> None:
        self._quota_bytes = quota_bytes
        self._quotas: dict[Hashable, int] = dict(quotas or {})
        self._number_of: dict[Hashable, int] = {}
        self._names: list[Hashable] = [None]
        self._bytes = [0]
        self._values = [0]
        self._unused: list[int] = []

    def number(self, name: Hashable) -> int:
        """The small number under which values of ``name`` are counted now; `OTHER` (0) beyond the bound."""
        number = self._number_of.get(name)
        if number is not None:
            return number
        if self._unused:
            number = self._unused.pop()
        elif len(self._names) <= MAX_SHARES:
            number = len(self._names)
            self._names.append(None)
            self._bytes.append(0)
            self._values.append(0)
        else:
            return OTHER
        self._number_of[name] = number
        self._names[number] = name
        return number

    def add(self, number: int, nbytes: int) -> None:
        """One more value."""
        self._bytes[number] += nbytes
        self._values[number] += 1

    def remove(self, number: int, nbytes: int) -> None:
        """One value less; a name without values is forgotten."""
        self._bytes[number] -= nbytes
        self._values[number] -= 1
        if not self._values[number] and number != OTHER and self._names[number] is not None:
            del self._number_of[self._names[number]]
            self._names[number] = None
            self._unused.append(number)

    def quota(self, number: int) -> int:
        """Bound in bytes of the share; 0 for none. Values of no namespace or group have only a bound of their own."""
        name = self._names[number]
        return self._quotas.get(name, self._quota_bytes if name or number == OTHER else 0)

    def value_bytes(self, number: int) -> int:
        """Bytes of the share."""
        return self._bytes[number]

    def by_name(self) -> dict[Hashable, Share]:
        """The largest `SHOWN` by name, and under None what the others have together, if anything."""
        numbers = sorted(self._number_of.values(), key=self._bytes.__getitem__, reverse=True)
        shown = {self._names[n]: Share(self._bytes[n], self._values[n]) for n in numbers[:SHOWN] if self._values[n]}
        rest = [OTHER, *numbers[SHOWN:]]
        others = Share(sum(self._bytes[n] for n in rest), sum(self._values[n] for n in rest))
        return {**shown, None: others} if others.values else dict(shown)


NAMESPACE_BYTES = 64


def namespace_of(key: bytes) -> bytes:
    """The namespace that a store key begins with: what stands before its first colon, if that comes within
    `NAMESPACE_BYTES`; else empty."""
    end = key.find(b":", 0, NAMESPACE_BYTES + 1)
    return key[:end] if end > 0 else b""
