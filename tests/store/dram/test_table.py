"""Keys and values: least recently used goes first but for pins, uploads are invisible until whole, what is being sent
stays.
"""

from __future__ import annotations

import math
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvhearth.store.dram.allocator import PAGE_BYTES, pages_for
from kvhearth.store.dram.events import EventKind
from kvhearth.store.dram.rules import Rules
from kvhearth.store.dram.shares import MAX_SHARES, Share
from kvhearth.store.dram.table import Published, Table
from kvhearth.store.protocol.header import HEADER_BYTES, Header

PAGES = 16


def put(table: Table, key: bytes, value: bytes, **more: Any) -> bool:
    return publish(table, key, value, **more) is Published.STORED


def publish(table: Table, key: bytes, value: bytes, **more: Any) -> Published:
    upload = table.reserve(len(value))
    if upload is None:
        return Published.NO_ROOM
    write(table.upload_views(upload), value)
    return table.publish(key, upload, **more)


def row(key: bytes, nbytes: int, **header: int) -> bytes:
    """A value with a header, ``nbytes`` long."""
    payload = bytes(nbytes - HEADER_BYTES)
    return Header(**header).sealed(key, payload).pack() + payload


def write(views: list[memoryview], value: bytes) -> None:
    for view in views:
        view[:], value = value[: len(view)], value[len(view) :]
    assert not value


def get(table: Table, key: bytes) -> bytes | None:
    slot = table.lease(key)
    if slot is None:
        return None
    value = b"".join(table.views(slot))
    table.release(slot)
    return value


class Clock:
    """Monotonic seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


LRU = Rules(policy="lru")


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table(PAGES * PAGE_BYTES, max_items=100, rules=LRU)
    yield made
    made.close()


keys = st.sampled_from([bytes([letter]) for letter in b"abcdefgh"])
sizes = st.sampled_from([0, 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 8 * PAGE_BYTES, 9 * PAGE_BYTES])


class AgainstAnOrderedDict(RuleBasedStateMachine):
    """The reference: an ordered dict from least to most recently used, a set of pins, and arithmetic on pages."""

    max_items = 5

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(PAGES * PAGE_BYTES, self.max_items, rules=LRU)
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
        del self.values[next(key for key in self.values if key not in self.pins)]

    @rule(key=keys, size=sizes, group=st.integers(0, 2))
    def put(self, key: bytes, size: int, group: int) -> None:
        self.stamp += 1
        if size > HEADER_BYTES:
            value = row(key, size, group=group, epoch=self.stamp)
        else:
            value, group = (b"%s%d;" % (key, self.stamp) * size)[:size], 0
        stored = put(self.table, key, value)
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
    def present_quietly(self, asked: list[bytes]) -> None:
        assert self.table.present_quietly(asked) == [key in self.values for key in asked]

    @rule(asked=st.lists(keys, max_size=3))
    def delete(self, asked: list[bytes]) -> None:
        assert self.table.delete(asked) == list(dict.fromkeys(key for key in asked if key in self.values))
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
    write(table.upload_views(entry), b"new")
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
    assert table.present(chain) == [True] * 3
    for number in range(PAGES - 2):
        put(table, b"%d" % number, bytes(PAGE_BYTES))
    assert table.present_quietly(chain) == [True, True, False]


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
    assert table.delete([b"other"]) == [b"other"]
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
    table = Table(PAGES * PAGE_BYTES, max_items=4, rules=LRU)
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


# ---- time to live


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(clock: Clock) -> Iterator[Table]:
    made = Table(PAGES * PAGE_BYTES, max_items=100, rules=Rules(policy="lru", ttl_seconds=50), clock=clock)
    yield made
    made.close()


def test_a_value_outlives_its_time_for_nobody(timed: Table, clock: Clock) -> None:
    put(timed, b"short", b"1", ttl_seconds=10)
    put(timed, b"usual", b"2")
    put(timed, b"ever", b"3", ttl_seconds=math.inf)
    assert timed.ttl_seconds(b"short") == 10
    assert timed.ttl_seconds(b"usual") == 50
    assert timed.ttl_seconds(b"ever") == math.inf
    clock.now += 10
    assert get(timed, b"short") is None
    assert timed.present([b"short", b"usual", b"ever"]) == [False, True, True]
    clock.now += 40
    assert timed.sweep() == 1
    assert len(timed) == 1
    assert timed.stats().expirations == 2
    assert timed.ttl_seconds(b"usual") is None


def test_a_life_can_be_given_and_taken_later(timed: Table, clock: Clock) -> None:
    put(timed, b"k", b"v")
    assert timed.expire(b"k", 5)
    assert not timed.expire(b"absent", 5)
    assert timed.expire(b"k", math.inf)
    clock.now += 1000
    assert get(timed, b"k") == b"v"


def test_a_value_that_expires_while_it_is_sent_keeps_its_bytes(timed: Table, clock: Clock) -> None:
    put(timed, b"k", b"v" * PAGE_BYTES, ttl_seconds=1)
    slot = timed.lease(b"k")
    assert slot is not None
    clock.now += 2
    assert timed.sweep() == 1
    for number in range(2 * PAGES):
        put(timed, b"%d" % number, bytes(PAGE_BYTES))
    assert b"".join(timed.views(slot)) == b"v" * PAGE_BYTES
    timed.release(slot)


# ---- conditions


def test_a_condition_on_the_key_is_judged_when_the_value_has_arrived(table: Table) -> None:
    assert publish(table, b"k", b"1", only_if_present=True) is Published.UNWANTED
    assert publish(table, b"k", b"1", only_if_present=False) is Published.STORED
    assert publish(table, b"k", b"2", only_if_present=False) is Published.UNWANTED
    assert publish(table, b"k", b"3", only_if_present=True) is Published.STORED
    assert publish(table, b"k", b"4", unless=lambda: True) is Published.UNWANTED
    assert get(table, b"k") == b"3"
    assert table.stats().used_bytes == PAGE_BYTES


# ---- pins end by themselves


def test_a_pin_ends_by_itself_so_that_a_dead_owner_keeps_nothing(timed: Table, clock: Clock) -> None:
    put(timed, b"k", b"v", ttl_seconds=math.inf)
    assert timed.pin([b"k"], 20) == 1
    assert timed.pin([b"k"], 5) == 1  # the longer one holds
    clock.now += 19
    for number in range(2 * PAGES):
        put(timed, b"%d" % number, bytes(PAGE_BYTES))
    assert get(timed, b"k") == b"v"
    clock.now += 1
    for number in range(2 * PAGES):
        put(timed, b"%d" % number, bytes(PAGE_BYTES))
    assert get(timed, b"k") is None
    assert timed.stats().pinned_bytes == 0


# ---- quotas


@pytest.fixture
def shared() -> Iterator[Table]:
    quotas: dict[bytes | int, int] = {b"poor": 2 * PAGE_BYTES, 7: 3 * PAGE_BYTES}
    rules = Rules(policy="lru", namespace_quota_bytes=8 * PAGE_BYTES, group_quota_bytes=4 * PAGE_BYTES, quotas=quotas)
    made = Table(PAGES * PAGE_BYTES, max_items=100, rules=rules)
    yield made
    made.close()


def test_a_namespace_over_its_quota_loses_its_own_oldest_and_nobody_elses(shared: Table) -> None:
    put(shared, b"rich:old", bytes(PAGE_BYTES))
    for number in range(10):
        assert put(shared, b"poor:%d" % number, bytes(PAGE_BYTES))
        assert shared.namespaces()["poor"].value_bytes <= 2 * PAGE_BYTES
    assert get(shared, b"rich:old") is not None
    assert get(shared, b"poor:9") is not None
    assert get(shared, b"poor:0") is None
    assert publish(shared, b"poor:large", bytes(3 * PAGE_BYTES)) is Published.OVER_QUOTA
    assert publish(shared, b"rich:large", bytes(6 * PAGE_BYTES)) is Published.STORED


def test_a_group_pays_for_what_it_put_and_those_without_a_group_have_no_bound(shared: Table) -> None:
    for number in range(10):
        put(shared, b"a:%d" % number, row(b"a:%d" % number, PAGE_BYTES, group=7))
        put(shared, b"b:%d" % number, row(b"b:%d" % number, PAGE_BYTES, group=8))
    assert shared.groups()["00000007"].value_bytes == 3 * PAGE_BYTES
    assert shared.groups()["00000008"].value_bytes <= 4 * PAGE_BYTES
    for number in range(PAGES):
        assert put(shared, b"%d" % number, bytes(PAGE_BYTES))
    assert shared.groups()["00000000"].value_bytes == PAGES * PAGE_BYTES


def test_what_cannot_go_leaves_a_quota_taken_and_the_put_is_refused(shared: Table) -> None:
    for number in range(2):
        put(shared, b"poor:%d" % number, bytes(PAGE_BYTES))
    assert shared.pin([b"poor:0", b"poor:1"]) == 2
    assert publish(shared, b"poor:2", bytes(PAGE_BYTES)) is Published.OVER_QUOTA
    assert shared.stats().used_bytes == 2 * PAGE_BYTES


def test_made_up_namespaces_are_bounded_and_counted_together() -> None:
    table = Table(PAGES * PAGE_BYTES * 600, max_items=8000, rules=LRU)
    for number in range(MAX_SHARES + 100):
        put(table, b"n%d:k" % number, b"v")
    shown = table.namespaces()
    assert len(shown) <= 65
    assert sum(share.values for share in shown.values()) == MAX_SHARES + 100
    table.close()


# ---- one million chunks


def test_bookkeeping_of_a_chunk_stays_small() -> None:
    count = 20_000
    table = Table(count * PAGE_BYTES, max_items=count)
    put(table, b"warm", b"up")
    tracemalloc.start()
    for number in range(count - 1):
        put(table, b"%032x:%036d" % (7, number), b"v")
    current, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == count
    assert current / count < 400
    table.close()


def test_keys_can_be_listed_a_few_at_a_time(table: Table) -> None:
    expected = {b"%d" % number for number in range(12)}
    for key in expected:
        put(table, key, b"v")
    table.delete([b"3"])
    seen: list[bytes] = []
    cursor = 0
    while True:
        keys, cursor = table.keys_from(cursor, 5)
        seen += keys
        if not cursor:
            break
    assert sorted(seen) == sorted(expected - {b"3"})


# ---- events


def test_puts_and_evictions_are_told_in_order(table: Table) -> None:
    put(table, b"a", b"1")
    put(table, b"a", b"2")  # put anew: nothing went
    table.delete([b"a"])
    for number in range(PAGES + 1):
        put(table, b"%d" % number, bytes(PAGE_BYTES))
    table.clear()
    told = table.events.since(0, 1000)
    assert told is not None
    assert told[:3] == [
        (EventKind.PUT, b"d", b"a"),
        (EventKind.PUT, b"d", b"a"),
        (EventKind.EVICT, b"d", b"a"),
    ]
    assert [event.key for event in told if event.kind is EventKind.EVICT] == [b"a", b"0"]
    assert told[-1] == (EventKind.CLEAR, b"d", b"")
