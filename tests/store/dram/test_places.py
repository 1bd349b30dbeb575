"""Values lie where they were put, in one piece or in several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvhearth.store.dram.allocator import PAGE_BYTES
from kvhearth.store.dram.places import Places, extents


@pytest.fixture
def places() -> Iterator[Places]:
    made = Places(8, 16, None, huge_pages=False)
    yield made
    made.pool.close()


def test_a_scattered_value_is_found_again_whole_and_given_back_whole(places: Places) -> None:
    one, two, three = (places.take(2 * PAGE_BYTES) for _ in range(3))
    places.settle(1, two)
    places.give_back(one)
    places.give_back(three)  # free: two pages, then four
    nbytes = 5 * PAGE_BYTES + 7
    runs = places.take(nbytes)
    assert len(runs) == 2
    places.settle(2, runs)
    for view in places.views(runs, nbytes):
        view[:] = b"x" * len(view)
    assert sum(length for _, length in extents(places.runs(2, nbytes), nbytes)) == nbytes
    assert b"".join(places.views(places.runs(2, nbytes), nbytes)) == b"x" * nbytes
    assert places.runs(1, 2 * PAGE_BYTES) == two
    places.clear(2, nbytes)
    places.clear(1, 2 * PAGE_BYTES)
    assert places.free_pages == places.pages == 8


def test_more_than_is_free_is_a_fault_of_the_caller(places: Places) -> None:
    with pytest.raises(RuntimeError, match="were to fit into 8 pages"):
        places.take(9 * PAGE_BYTES)
