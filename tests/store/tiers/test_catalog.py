"""The index of a disk tier against a dict, within its bounds at every step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvhearth.store.tiers.catalog import Catalog
from kvhearth.store.tiers.files import file_bytes
from kvhearth.store.tiers.names import Entry

CAPACITY, MOST_FILES = 2000, 8
KEYS = st.sampled_from([b"k%d" % number for number in range(20)])


def entry(key: bytes, nbytes: int, written: int = 0, position: int = 0) -> Entry:
    return Entry(key, nbytes, position, 3, 4, written * 1_000_000 + position)  # within a second the head came first


class CatalogMachine(RuleBasedStateMachine):
    """Writes, reads, deletions and searches; the least recently used go."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog(CAPACITY, MOST_FILES, "lru")
        self.model: dict[bytes, Entry] = {}  # oldest first

    @rule(key=KEYS, nbytes=st.integers(0, 600))
    def write(self, key: bytes, nbytes: int) -> None:
        size = file_bytes(key, nbytes)
        gone = self.catalog.reserve(size)
        assert gone is not None
        for old in gone:
            assert self.model.pop(next(iter(self.model))) == old
        self.catalog.add(entry(key, nbytes))
        self.model.pop(key, None)
        self.model[key] = entry(key, nbytes)

    @rule(keys=st.lists(KEYS, min_size=2, max_size=6))
    def look(self, keys: list[bytes]) -> None:
        sizes = self.catalog.sizes(keys)
        assert sizes == [self.model[key].nbytes if key in self.model else 0 for key in keys]
        for key in dict.fromkeys(reversed(keys)):
            if key in self.model:
                self.model[key] = self.model.pop(key)

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        assert self.catalog.remove(key) == self.model.pop(key, None)

    @rule(key=KEYS, nbytes=st.integers(0, 600))
    def find(self, key: bytes, nbytes: int) -> None:
        found = entry(key, nbytes)
        surplus = self.catalog.found([found])
        if key in self.model:
            assert surplus == ([] if self.model[key] == found else [found])
            return
        for old in surplus:
            assert self.model.pop(next(iter(self.model))) == old
        self.model[key] = found

    @rule(nbytes=st.integers(0, 1000))
    def evict(self, nbytes: int) -> None:
        for old in self.catalog.evict(nbytes):
            assert self.model.pop(next(iter(self.model))) == old

    @rule()
    def clear(self) -> None:
        self.catalog.clear()
        self.model.clear()

    @invariant()
    def same_as_the_model_and_within_bounds(self) -> None:
        assert set(self.catalog.keys()) == set(self.model)
        assert all(self.catalog.get(key) == kept for key, kept in self.model.items())
        assert self.catalog.value_bytes == sum(kept.nbytes for kept in self.model.values())
        stored = sum(file_bytes(kept.key, kept.nbytes) for kept in self.model.values())
        assert self.catalog.stored_bytes == stored <= CAPACITY
        assert len(self.catalog) <= MOST_FILES


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_what_is_being_written_counts_before_it_is_there() -> None:
    catalog = Catalog(1000, 8, "lru")
    assert catalog.reserve(600) == []
    assert catalog.reserve(600) is None
    catalog.unreserve(600)
    assert catalog.reserve(600) == []


def test_a_reservation_that_fails_evicts_nothing() -> None:
    catalog = Catalog(1000, 8, "lru")
    catalog.found([entry(b"kept", 100)])
    assert catalog.reserve(800) == []
    assert catalog.reserve(400) is None
    assert b"kept" in catalog


@given(st.permutations(range(6)))
def test_a_search_restores_the_order_of_writing_and_within_a_second_the_tail_goes_first(order: list[int]) -> None:
    entries = [entry(b"old", 1, 5), *(entry(b"c%d" % n, 1, 7, n) for n in range(4)), entry(b"new", 1, 9)]
    catalog = Catalog(10_000, 100, "lru")
    catalog.begin_search()
    catalog.found([entries[number] for number in order])
    catalog.end_search()
    gone = [old.key for old in catalog.evict(10_000)]
    assert gone == [b"old", b"c3", b"c2", b"c1", b"c0", b"new"]


def test_a_search_forgets_what_is_not_there_and_keeps_what_was_asked_for_longest() -> None:
    catalog = Catalog(10_000, 100, "lru")
    catalog.found([entry(b"ghost", 1, 1)])
    catalog.begin_search()
    catalog.found([entry(b"asked", 1, 1), entry(b"new", 1, 9)])
    catalog.sizes([b"asked", b"nothing"])
    catalog.end_search()
    assert b"ghost" not in catalog
    assert [old.key for old in catalog.evict(10_000)] == [b"new", b"asked"]


def test_a_chain_that_is_read_chunk_by_chunk_keeps_its_head_longest() -> None:
    catalog = Catalog(10_000, 100, "lru")
    keys = [b"c%d" % n for n in range(4)]
    catalog.found([entry(key, 1, position=n) for n, key in enumerate(keys)])
    catalog.sizes(keys)
    for key in keys:
        catalog.sizes([key])
    assert [old.key for old in catalog.evict(10_000)] == keys[::-1]
