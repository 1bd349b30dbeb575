"""Where in the pool the value of each slot lies: the pool, its free pages, and a column of first pages. Which values
there are is the table's business.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvhearth.store.dram.allocator import PAGE_BYTES, PageAllocator, Run, pages_for
from kvhearth.store.dram.pool import Pool, Progress

_SCATTERED = 2**32 - 1

Runs = tuple[Run, ...]


class Places:
    """Pages of values by slot. Not thread-safe, but for the views.

    Args:
        pages: of the pool.
        slots: most values that have a place at once.
        progress: called while the pool is faulted in.
        huge_pages: take the pool from the system's reserved huge pages.

    Raises:
        UserError: the memory cannot be had.
    """

    def __init__(self, pages: int, slots: int, progress: Progress | None, *, huge_pages: bool) -> None:
        self.pool = Pool(pages, progress, huge_pages=huge_pages)
        self._allocator = PageAllocator(pages)
        firsts: NDArray[np.uint32] = np.zeros(slots, np.uint32)
        self._first = firsts.data
        self._scattered: dict[int, Runs] = {}

    @property
    def pages(self) -> int:
        """Pages in all."""
        return self._allocator.pages

    @property
    def free_pages(self) -> int:
        """Pages that nothing lies in."""
        return self._allocator.free_pages

    def take(self, nbytes: int) -> Runs:
        """Pages for ``nbytes`` bytes, of which enough are free."""
        runs = self._allocator.allocate(pages_for(nbytes))
        if runs is None:
            raise RuntimeError(f"{nbytes} bytes were to fit into {self.free_pages} pages")
        return runs

    def give_back(self, runs: Runs) -> None:
        """Nothing lies in these pages any more."""
        self._allocator.release(runs)

    def settle(self, slot: int, runs: Runs) -> None:
        """The value of ``slot`` lies there."""
        if len(runs) == 1:
            self._first[slot] = runs[0].first
        else:
            self._first[slot] = _SCATTERED
            self._scattered[slot] = runs

    def clear(self, slot: int, nbytes: int) -> None:
        """The value of ``slot`` is gone."""
        self._allocator.release(self.runs(slot, nbytes))
        self._scattered.pop(slot, None)

    def runs(self, slot: int, nbytes: int) -> Runs:
        """Where the value of ``slot``, so long, lies."""
        first = self._first[slot]
        return self._scattered[slot] if first == _SCATTERED else (Run(first, pages_for(nbytes)),)

    def views(self, runs: Runs, nbytes: int) -> list[memoryview]:
        """The first ``nbytes`` bytes of ``runs``, in order."""
        return self.pool.views(runs, nbytes)


def extents(runs: Runs, nbytes: int) -> list[tuple[int, int]]:
    """The first ``nbytes`` bytes of ``runs`` as (offset in the pool, length), in order."""
    found = []
    for first, pages in runs:
        length = min(pages * PAGE_BYTES, nbytes)
        found.append((first * PAGE_BYTES, length))
        nbytes -= length
    return found
