"""Pages for values of any size: no page twice, none lost, and no fragmentation that costs capacity."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvhearth.store.dram.allocator import PAGE_BYTES, PageAllocator, Run, pages_for

PAGES = 64


class AgainstASetOfPages(RuleBasedStateMachine):
    """The reference is the plain set of free page numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.free = set(range(PAGES))
        self.taken: list[tuple[Run, ...]] = []

    @rule(count=st.integers(0, PAGES + 1))
    def allocate(self, count: int) -> None:
        runs = self.allocator.allocate(count)
        if count > len(self.free):
            assert runs is None
            return
        assert runs is not None
        pages = [page for run in runs for page in range(run.first, run.first + run.pages)]
        assert len(pages) == count == len(set(pages))
        assert set(pages) <= self.free
        self.free -= set(pages)
        self.taken.append(runs)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        runs = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.allocator.release(runs)
        self.free |= {page for run in runs for page in range(run.first, run.first + run.pages)}

    @invariant()
    def the_free_pages_are_the_references(self) -> None:
        runs = self.allocator.free_runs()
        assert {page for run in runs for page in range(run.first, run.first + run.pages)} == self.free
        assert self.allocator.free_pages == len(self.free)

    @invariant()
    def neighbours_are_merged(self) -> None:
        runs = self.allocator.free_runs()
        assert all(a.first + a.pages < b.first for a, b in pairwise(runs))


TestAgainstASetOfPages = AgainstASetOfPages.TestCase
TestAgainstASetOfPages.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_the_worst_fragmentation_still_gives_every_free_page_to_one_value() -> None:
    allocator = PageAllocator(PAGES)
    singles = [allocator.allocate(1) for _ in range(PAGES)]
    for single in singles[::2]:
        assert single is not None
        allocator.release(single)
    runs = allocator.allocate(PAGES // 2)
    assert runs is not None
    assert sum(run.pages for run in runs) == PAGES // 2


def test_a_fresh_pool_gives_one_run_a_value() -> None:
    allocator = PageAllocator(PAGES)
    assert [allocator.allocate(7), allocator.allocate(9)] == [(Run(0, 7),), (Run(7, 9),)]


@given(st.integers(0, 10**9))
def test_a_value_takes_its_bytes_and_less_than_a_page_more(nbytes: int) -> None:
    assert nbytes <= pages_for(nbytes) * PAGE_BYTES < nbytes + PAGE_BYTES


@pytest.mark.parametrize("pages", [0, 1])
def test_the_smallest_pools(pages: int) -> None:
    allocator = PageAllocator(pages)
    assert allocator.allocate(pages + 1) is None
    runs = allocator.allocate(pages)
    assert runs is not None
    allocator.release(runs)
    assert allocator.free_pages == pages
