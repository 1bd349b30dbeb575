"""Pages of the pool for values of any size. Not thread-safe; not aware of keys or bytes.

Free runs of pages are kept by size class, so that a value lies in one run while any run is clearly long enough. When
none is, it is put together from the longest ones and sent with scatter/gather: fragmentation can cost speed, never
capacity. The only waste is the tail of a value's last page.
"""

from __future__ import annotations

from typing import NamedTuple

PAGE_BYTES = 512
"""Unit of allocation: small, as a row of 2**n bytes with its header would else waste up to half."""

_CLASSES_PER_DOUBLING = 4
_LOOKS = 32


class Run(NamedTuple):
    """``pages`` adjacent pages from page ``first``."""

    first: int
    pages: int


def pages_for(nbytes: int) -> int:
    """Pages that ``nbytes`` bytes take."""
    return -(-nbytes // PAGE_BYTES)


class PageAllocator:
    """Free pages of a pool, kept as maximal runs in size classes.

    Invariant: free runs never touch, as neighbours are merged on release.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free_pages = 0
        self._length_of: dict[int, int] = {}
        self._first_before: dict[int, int] = {}
        self._by_class: list[dict[int, None]] = [{} for _ in range(_size_class(max(1, pages)) + 1)]
        self._filled = 0
        """Bit n: class n has a run."""
        if pages:
            self.free_pages = pages
            self._add(0, pages)

    def allocate(self, count: int) -> tuple[Run, ...] | None:
        """``count`` pages in as few runs as can be, or None when fewer are free (then nothing is taken)."""
        if count > self.free_pages:
            return None
        self.free_pages -= count
        runs = []
        while count:
            first = self._long_enough(count)
            if first is None:
                first = next(reversed(self._by_class[self._filled.bit_length() - 1]))
            length = self._take(first)
            taken = min(count, length)
            runs.append(Run(first, taken))
            if taken < length:
                self._add(first + taken, length - taken)
            count -= taken
        return tuple(runs)

    def release(self, runs: tuple[Run, ...]) -> None:
        """Give back what `allocate` returned, once."""
        for first, count in runs:
            self.free_pages += count
            start, end = first, first + count
            before = self._first_before.get(start)
            if before is not None:
                self._take(before)
                start = before
            if end in self._length_of:
                end += self._take(end)
            self._add(start, end - start)

    def free_runs(self) -> list[Run]:
        """The free runs by position (for tests and figures)."""
        return sorted(Run(first, count) for first, count in self._length_of.items())

    def _long_enough(self, count: int) -> int | None:
        # The own class holds shorter runs too, so a few are looked at; from the next class on any will do.
        own = _size_class(count)
        for looked, first in enumerate(reversed(self._by_class[own])):
            if self._length_of[first] >= count:
                return first
            if looked == _LOOKS:
                break
        longer = self._filled >> (own + 1)
        if longer:
            lowest = own + (longer & -longer).bit_length()
            return next(reversed(self._by_class[lowest]))
        return None

    def _add(self, first: int, count: int) -> None:
        self._length_of[first] = count
        self._first_before[first + count] = first
        size_class = _size_class(count)
        self._by_class[size_class][first] = None
        self._filled |= 1 << size_class

    def _take(self, first: int) -> int:
        count = self._length_of.pop(first)
        del self._first_before[first + count]
        size_class = _size_class(count)
        del self._by_class[size_class][first]
        if not self._by_class[size_class]:
            self._filled &= ~(1 << size_class)
        return count


def _size_class(count: int) -> int:
    """Number of the size class of a run: four to each doubling."""
    doublings = count.bit_length() - 3
    if doublings <= 0:
        return count - 1
    return doublings * _CLASSES_PER_DOUBLING + (count >> doublings) - 1
