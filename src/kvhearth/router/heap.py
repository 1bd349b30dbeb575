"""A priority queue whose items can be moved and dropped. Where they never are, `heapq` alone will do."""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Any)

SPARE_ENTRIES = 64
"""Dead entries that a small heap may have before they are swept out."""


class Heap(Generic[Item, Key]):
    """Items by key, the smallest first; of equal keys the one that was put first. O(log n) each, amortized.

    What is moved or dropped leaves a dead entry behind; there are never more of them than items and `SPARE_ENTRIES`.
    """

    __slots__ = ("_entries", "_numbers", "_puts")

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, Item]] = []
        self._numbers: dict[Item, int] = {}
        self._puts = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, item: Item) -> bool:
        return item in self._numbers

    def put(self, item: Item, key: Key, *, ahead: bool = False) -> None:
        """Insert an item, or give it another key; ``ahead``: before all of the same key."""
        self._puts += 1
        number = -self._puts if ahead else self._puts
        self._numbers[item] = number
        heapq.heappush(self._entries, (key, number, item))
        self._sweep()

    def drop(self, item: Item) -> None:
        """Take an item out, if it is in."""
        if self._numbers.pop(item, None) is not None:
            self._sweep()

    def first(self) -> Item:
        """The item with the smallest key; it stays in. Raises LookupError when there is none."""
        return self._top()[2]

    def smallest(self) -> Key:
        """The smallest key. Raises LookupError when there is none."""
        return self._top()[0]

    def _top(self) -> tuple[Key, int, Item]:
        entries, numbers = self._entries, self._numbers
        while numbers.get(entries[0][2]) != entries[0][1]:
            heapq.heappop(entries)
        return entries[0]

    def _sweep(self) -> None:
        numbers = self._numbers
        if len(self._entries) > 2 * len(numbers) + SPARE_ENTRIES:
            self._entries = [entry for entry in self._entries if numbers.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)
