"""Keys and values: least recently used goes first, uploads are invisible until whole, what is being sent stays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvhearth.store.allocator import PAGE_BYTES, pages_for
from kvhearth.store.table import Table

PAGES = 16


def put(table: Table, key: bytes, value: bytes) -> bool:
    entry = table.reserve(len(value))
    if entry is None:
        return False
    write(table.views(entry), value)
    return table.publish(key, entry)


def write(views: list[memoryview], value: bytes) -> None:
    for view in views:
        view[:], value = value[: len(view)], value[len(view) :]
    assert not value


def get(table: Table, key: bytes) -> bytes | None:
    entry = table.lease(key)
    if entry is None:
        return None
    value = b"".join(table.views(entry))
    table.release(entry)
    return value


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table(PAGES * PAGE_BYTES, max_items=100)
    yield made
    made.close()


keys = st.sampled_from([bytes([letter]) for letter in b"abcdefgh"])
sizes = st.sampled_from([0, 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 8 * PAGE_BYTES, 9 * PAGE_BYTES])


class AgainstAnOrderedDict(RuleBasedStateMachine):
    """The reference: an ordered dict from least to most recently used, and arithmetic on pages."""

    max_items = 5

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(PAGES * PAGE_BYTES, self.max_items)
        self.values: OrderedDict[bytes, bytes] = OrderedDict()
        self.stamp = 0

    def teardown(self) -> None:
        self.table.close()

    def used(self) -> int:
        return sum(pages_for(len(value)) for value in self.values.values())

    @rule(key=keys, size=sizes)
    def put(self, key: bytes, size: int) -> None:
        self.stamp += 1
        value = (b"%s%d;" % (key, self.stamp) * size)[:size]
        stored = put(self.table, key, value)
        assert stored == (pages_for(size) <= PAGES // 2)
        if stored:
            while self.used() + pages_for(size) > PAGES:
                self.values.popitem(last=False)
            self.values.pop(key, None)
            while len(self.values) >= self.max_items:
                self.values.popitem(last=False)
            self.values[key] = value

    @rule(key=keys)
    def get(self, key: bytes) -> None:
        assert get(self.table, key) == self.values.get(key)
        if key in self.values:
            self.values.move_to_end(key)

    @rule(asked=st.lists(keys, max_size=6))
    def match(self, asked: list[bytes]) -> None:
        present = next((index for index, key in enumerate(asked) if key not in self.values), len(asked))
        assert self.table.match(asked) == present
        for key in reversed(asked[:present]):
            self.values.move_to_end(key)

    @rule(asked=st.lists(keys, max_size=4))
    def exists(self, asked: list[bytes]) -> None:
        assert self.table.exists(asked) == sum(key in self.values for key in asked)

    @rule(asked=st.lists(keys, max_size=3))
    def delete(self, asked: list[bytes]) -> None:
        assert self.table.delete(asked) == len({key for key in asked if key in self.values})
        for key in asked:
            self.values.pop(key, None)

    @rule()
    def abandon_an_upload(self) -> None:
        before = self.table.stats().used_bytes
        entry = self.table.reserve(0)
        assert entry is not None
        self.table.abandon(entry)
        assert self.table.stats().used_bytes == before

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.values.clear()

    @invariant()
    def figures_add_up(self) -> None:
        stats = self.table.stats()
        assert stats.items == len(self.table) == len(self.values)
        assert stats.value_bytes == sum(map(len, self.values.values()))
        assert stats.used_bytes == self.used() * PAGE_BYTES
        assert stats.uploading_bytes == 0


TestAgainstAnOrderedDict = AgainstAnOrderedDict.TestCase
TestAgainstAnOrderedDict.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_an_upload_is_invisible_until_it_is_whole(table: Table) -> None:
    put(table, b"k", b"old")
    entry = table.reserve(3)
    assert entry is not None
    write(table.views(entry), b"new")
    assert get(table, b"k") == b"old"
    table.publish(b"k", entry)
    assert get(table, b"k") == b"new"


def test_a_value_being_sent_keeps_its_bytes_while_it_is_evicted_replaced_and_deleted(table: Table) -> None:
    value = bytes(range(256)) * (PAGE_BYTES // 256)
    put(table, b"sending", value)
    entry = table.lease(b"sending")
    assert entry is not None
    views = table.views(entry)
    put(table, b"sending", b"replaced")
    table.delete([b"sending"])
    for number in range(4 * PAGES):
        put(table, b"flood%d" % number, bytes([number]) * PAGE_BYTES)
        assert b"".join(views) == value
    used = table.stats().used_bytes
    table.release(entry)
    assert table.stats().used_bytes == used - PAGE_BYTES


def test_memory_that_is_all_being_sent_or_received_is_refused_not_waited_for(table: Table) -> None:
    uploads = [table.reserve(PAGE_BYTES) for _ in range(PAGES // 2)]
    assert table.reserve(1) is None  # uploads may take half of the pool
    for number, upload in enumerate(uploads):
        assert upload is not None
        table.publish(b"%d" % number, upload)
    leases = [table.lease(b"%d" % number) for number in range(PAGES // 2)]
    assert put(table, b"large", bytes(8 * PAGE_BYTES))
    large = table.lease(b"large")
    assert table.reserve(1) is None
    assert table.stats().refused_uploads == 2
    assert len(table) == PAGES // 2 + 1  # nothing was dropped that would not have given memory
    for entry in [*leases, large]:
        assert entry is not None
        table.release(entry)
    assert put(table, b"again", b"x")


def test_a_chain_loses_its_tail_before_its_head(table: Table) -> None:
    chain = [b"head", b"middle", b"tail"]
    for key in chain:
        put(table, key, bytes(PAGE_BYTES))
    assert table.match(chain) == 3
    for number in range(PAGES - 2):
        put(table, b"%d" % number, bytes(PAGE_BYTES))
    assert [table.exists([key]) for key in chain] == [1, 1, 0]
