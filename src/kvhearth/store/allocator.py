"""Pages of the pool for values of any size. Not thread-safe; not aware of keys or bytes.

A value need not be contiguous: it is received and sent with scatter/gather, so any free page serves any value and
fragmentation can cost speed (more runs) but never capacity. The only waste is the tail of a value's last page.
"""

from __future__ import annotations

from typing import NamedTuple

PAGE_BYTES = 512
"""Unit of allocation: small, as a row of 2**n bytes with its header would else waste up to half."""


class Run(NamedTuple):
    """``pages`` adjacent pages from page ``first``."""

    first: int
    pages: int


def pages_for(nbytes: int) -> int:
    """Pages that ``nbytes`` bytes take."""
    return -(-nbytes // PAGE_BYTES)


class PageAllocator:
    """Free pages of a pool, kept as maximal runs.

    Invariant: free runs never touch (neighbours are merged on release), so a value of fresh or LRU-freed memory is
    usually one run.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free_pages = pages
        self._count_from: dict[int, int] = {0: pages} if pages else {}
        self._first_before: dict[int, int] = {pages: 0} if pages else {}

    def allocate(self, count: int) -> tuple[Run, ...] | None:
        """``count`` pages in as few runs as come to hand, or None when fewer are free (then nothing is taken)."""
        if count > self.free_pages:
            return None
        self.free_pages -= count
        runs = []
        while count:
            # The run freed or split last: sequential fill when fresh, recently used memory later.
            first, length = self._count_from.popitem()
            del self._first_before[first + length]
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
            before = self._first_before.pop(start, None)
            if before is not None:
                del self._count_from[before]
                start = before
            after = self._count_from.pop(end, None)
            if after is not None:
                del self._first_before[end + after]
                end += after
            self._add(start, end - start)

    def free_runs(self) -> list[Run]:
        """The free runs by position (for tests and figures)."""
        return sorted(Run(first, count) for first, count in self._count_from.items())

    def _add(self, first: int, count: int) -> None:
        self._count_from[first] = count
        self._first_before[first + count] = first
