"""A heap whose items move: against a dict, and within n log n comparisons and bounded garbage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.router.heap import SPARE_ENTRIES, Heap

OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "drop", "ahead"]), st.integers(0, 5), st.integers(0, 3)))


@given(OPERATIONS)
def test_the_first_is_the_smallest_and_of_equal_ones_the_earliest(operations: list[tuple[str, int, int]]) -> None:
    heap: Heap[int, int] = Heap()
    expected: dict[int, tuple[int, int]] = {}
    for number, (what, item, key) in enumerate(operations, 1):
        if what == "drop":
            heap.drop(item)
            expected.pop(item, None)
        else:
            heap.put(item, key, ahead=what == "ahead")
            expected[item] = (key, -number if what == "ahead" else number)
        assert len(heap) == len(expected)
        assert (item in heap) == (item in expected)
        if expected:
            assert heap.first() == min(expected, key=expected.__getitem__)
            assert heap.smallest() == min(expected.values())[0]
        else:
            with pytest.raises(LookupError):
                heap.first()


class Counted:
    """A key that counts how often it is compared."""

    comparisons = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: Counted) -> bool:
        Counted.comparisons += 1
        return self.value < other.value


def test_ten_thousand_items_that_move_cost_log_n_each_and_leave_little_behind() -> None:
    heap: Heap[int, Counted] = Heap()
    count = 10_000
    Counted.comparisons = 0
    for turn in range(4):
        for item in range(count):
            heap.put(item, Counted((item * 7919 + turn) % count))
            heap.first()
            assert len(heap._entries) <= 2 * len(heap) + SPARE_ENTRIES
    for item in range(count):
        heap.drop(item)
        assert len(heap._entries) <= 2 * len(heap) + SPARE_ENTRIES
    assert Counted.comparisons < 5 * count * 4 * math.log2(count)
