"""A queue in which moving to the back costs an append, and whose memory stays bounded all the same."""

from __future__ import annotations

import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.store.policies import queue as queue_module
from kvhearth.store.policies.queue import SlotQueue, Stamps


def drain(queue: SlotQueue, stamps: Stamps) -> list[int]:
    order = []
    while (slot := queue.front()) >= 0:
        order.append(slot)
        stamps.one[slot] = 0
    return order


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), min_size=1, max_size=8)), max_size=40))
def test_slots_come_in_the_order_of_their_last_push(events: list[tuple[int, list[int]]]) -> None:
    stamps = Stamps(10)
    queues, model = [SlotQueue(stamps), SlotQueue(stamps)], {}
    for what, slots in events:
        for slot in slots:
            model.pop(slot, None)
            if what < 2:
                model[slot] = what
        if what == 2:
            for slot in slots:
                stamps.one[slot] = 0
        elif len(slots) == 1:
            queues[what].push(slots[0])
        else:
            queues[what].push_many(np.array(slots))
        for number, queue in enumerate(queues):
            assert queue.front() == next((slot for slot, place in model.items() if place == number), -1)
    for number, queue in enumerate(queues):
        assert drain(queue, stamps) == [slot for slot, place in model.items() if place == number]


def test_a_slot_passed_over_comes_back_where_it_was() -> None:
    stamps = Stamps(6)
    queue = SlotQueue(stamps)
    queue.push_many(np.arange(6))
    for slot in (0, 1, 2):
        assert queue.front() == slot
        queue.skip()
    queue.recall(2)
    queue.recall(0)
    queue.recall(4)  # was not passed over: it keeps its place
    queue.push(1)
    queue.recall(1)  # is at the back by now
    queue.push_front(5)
    assert drain(queue, stamps) == [5, 0, 2, 3, 4, 1]


def test_a_million_uses_of_a_thousand_slots_leave_no_million_places() -> None:
    stamps = Stamps(20_000)
    queue = SlotQueue(stamps)
    rng = np.random.default_rng(1)
    for _ in range(4_000):
        queue.push_many(rng.permutation(20_000)[:256])
    blocks = [*queue._swept, *queue._unswept]
    held = sum(sys.getsizeof(column) for block in blocks for column in block)
    assert held <= 12 * (2.2 * 20_000 + 8 * queue_module._BLOCK)
    last = stamps.of.copy()
    assert drain(queue, stamps) == [slot for slot in np.argsort(last, kind="stable").tolist() if last[slot]]
