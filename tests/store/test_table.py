"""Keys and values: least recently used goes first but for pins, uploads are invisible until whole, what is being sent
stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvhearth.store.allocator import PAGE_BYTES, pages_for
from kvhearth.store.groups import Share
from kvhearth.store.table import Table

PAGES = 16


def put(table: Table, key: bytes, value: bytes, group: int = 0) -> bool:
    entry = table.reserve(len(value))
    if entry is None:
        return False
    write(table.views(entry), value)
    return table.publish(key, entry, group)


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
    """The reference: an ordered dict from least to most recently used, a set of pins, and arithmetic on pages."""

    max_items = 5

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(PAGES * PAGE_BYTES, self.max_items)
        self.values: OrderedDict[bytes, bytes] = OrderedDict()
        self.pins: set[bytes] = set()
        self.groups: dict[bytes, int] = {}
        self.stamp = 0

    def teardown(self) -> None:
        self.table.close()

    def used(self) -> int:
        return sum(pages_for(len(value)) for value in self.values.values())

    def pinned_pages(self) -> int:
        return sum(pages_for(len(self.values[key])) for key in self.pins)

    def evict(self) -> None:
        while (oldest := next(iter(self.values))) in self.pins:
            self.values.move_to_end(oldest)
        del self.values[oldest]

    @rule(key=keys, size=sizes, group=st.integers(0, 2))
    def put(self, key: bytes, size: int, group: int) -> None:
        self.stamp += 1
        value = (b"%s%d;" % (key, self.stamp) * size)[:size]
        stored = put(self.table, key, value, group)
        assert stored == (pages_for(size) <= PAGES // 2)  # whatever is pinned
        if stored:
            while self.used() + pages_for(size) > PAGES:
                self.evict()
            self.values.pop(key, None)
            while len(self.values) >= self.max_items:
                self.evict()
            self.values[key], self.groups[key] = value, group
            if self.pinned_pages() > PAGES // 2:
                self.pins.remove(key)

    @rule(asked=st.lists(keys, max_size=4))
    def pin(self, asked: list[bytes]) -> None:
        wanted = self.pins | {key for key in asked if key in self.values}
        pages = sum(pages_for(len(self.values[key])) for key in wanted)
        if pages > PAGES // 2 or len(wanted) > self.max_items // 2:
            assert self.table.pin(asked) is None
        else:
            assert self.table.pin(asked) == len({key for key in asked if key in self.values})
            self.pins = wanted

    @rule(asked=st.lists(keys, max_size=4))
    def unpin(self, asked: list[bytes]) -> None:
        assert self.table.unpin(asked) == len(self.pins & set(asked))
        self.pins -= set(asked)

    @rule(asked=st.lists(keys, max_size=6))
    def present(self, asked: list[bytes]) -> None:
        assert self.table.present(asked) == [key in self.values for key in asked]
        for key in reversed(asked):
            if key in self.values:
                self.values.move_to_end(key)

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
        self.pins -= set(asked)

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
        self.pins.clear()

    @invariant()
    def figures_add_up(self) -> None:
        stats = self.table.stats()
        assert stats.items == len(self.table) == len(self.values)
        assert stats.value_bytes == sum(map(len, self.values.values()))
        assert stats.used_bytes == self.used() * PAGE_BYTES
        assert stats.uploading_bytes == 0
        assert stats.pinned_bytes == self.pinned_pages() * PAGE_BYTES
        groups: dict[str, Share] = {}
        for key, value in self.values.items():
            name = f"{self.groups[key]:08x}"
            nbytes, count = groups.get(name, (0, 0))
            groups[name] = Share(nbytes + len(value), count + 1)
        assert self.table.groups() == groups

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        assert self.pins <= set(self.values)


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


def test_a_pinned_value_outlives_any_flood_and_goes_when_it_is_unpinned(table: Table) -> None:
    put(table, b"system prompt", b"keep me")
    assert table.pin([b"system prompt", b"absent", b"system prompt"]) == 1
    for number in range(4 * PAGES):
        assert put(table, b"%d" % number, bytes(PAGE_BYTES))
    assert get(table, b"system prompt") == b"keep me"
    assert table.unpin([b"system prompt"]) == 1
    for number in range(2 * PAGES):
        put(table, b"%d" % number, bytes(PAGE_BYTES))
    assert get(table, b"system prompt") is None


def test_pins_take_half_of_the_pool_and_what_goes_beyond_is_refused_whole(table: Table) -> None:
    chunks = [b"%d" % number for number in range(PAGES)]
    for key in chunks:
        put(table, key, bytes(PAGE_BYTES))
    half = PAGES // 2
    assert table.pin(chunks[: half - 1]) == half - 1
    assert table.pin(chunks[half - 1 : half + 1]) is None
    assert table.stats().pinned_bytes == (half - 1) * PAGE_BYTES
    assert table.pin(chunks[:half]) == half
    assert table.max_pinned_bytes == table.stats().pinned_bytes == half * PAGE_BYTES


def test_replacing_a_pinned_value_keeps_the_pin_unless_the_new_one_is_too_large_for_it(table: Table) -> None:
    put(table, b"k", b"old")
    put(table, b"other", bytes(PAGE_BYTES))
    table.pin([b"k", b"other"])
    put(table, b"k", bytes(2 * PAGE_BYTES))
    assert table.stats().pinned_bytes == 3 * PAGE_BYTES
    put(table, b"k", bytes(8 * PAGE_BYTES))
    assert table.stats().pinned_bytes == PAGE_BYTES
    assert table.delete([b"other"]) == 1
    assert table.stats().pinned_bytes == 0


def test_a_value_that_has_no_room_beside_pins_and_leases_is_refused_not_waited_for(table: Table) -> None:
    for key in (b"pinned", b"leased"):
        put(table, key, bytes(PAGES // 2 * PAGE_BYTES))
    assert table.pin([b"pinned"]) == 1
    lease = table.lease(b"leased")
    assert lease is not None
    assert not put(table, b"k", b"x")
    assert table.stats().refused_uploads == 1
    table.release(lease)
    assert put(table, b"k", b"x")
    assert get(table, b"pinned") is not None


def test_pins_take_half_of_the_items_so_that_small_values_find_a_place_too() -> None:
    table = Table(PAGES * PAGE_BYTES, max_items=4)
    for key in (b"a", b"b", b"c"):
        put(table, key, b"small")
    assert table.pin([b"a", b"b", b"c"]) is None
    assert table.pin([b"a", b"b"]) == 2
    assert table.pin([b"c"]) is None
    assert all(put(table, b"%d" % number, b"small") for number in range(10))
    table.close()


def test_asking_whether_a_chain_is_there_keeps_its_head_longest(table: Table) -> None:
    chain = [b"head", b"middle", b"tail"]
    for key in chain:
        put(table, key, bytes(PAGE_BYTES))
    assert table.present([*chain[:2], b"absent", chain[2]]) == [True, True, False, True]
    for number in range(PAGES - 2):
        put(table, b"%d" % number, bytes(PAGE_BYTES))
    assert table.present(chain) == [True, True, False]
