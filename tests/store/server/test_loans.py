"""What one client holds of the store's memory, and that it is bounded and ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvhearth.store.dram.allocator import PAGE_BYTES
from kvhearth.store.dram.table import Published, Table
from kvhearth.store.protocol.grants import MAX_NUMBERS, Grant, Refusal
from kvhearth.store.server.loans import Loans
from kvhearth.store.server.tiered import Tiered

from ..fakes import FakeTier, is_empty

MIB = 2**20
CAPACITY = 8 * MIB
SECONDS = 30.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> Iterator[Tiered]:
    made = Tiered(Table(CAPACITY, max_items=10_000))
    yield made
    made.close()
    made.table.close()


def loans_of(store: Tiered, clock: Clock | None = None) -> Loans:
    return Loans(store, SECONDS, clock or Clock())


def lease(loans: Loans, key: bytes) -> Grant:
    return loans.lease([key])[0]


def put(store: Tiered, key: bytes, nbytes: int) -> None:
    upload = store.table.reserve(nbytes)
    assert upload is not None
    for view in store.table.upload_views(upload):
        view[:] = key[:1] * len(view)
    assert store.publish(key, upload) is Published.STORED


def test_a_lease_tells_where_the_value_lies_and_keeps_it_there(store: Tiered) -> None:
    loans = loans_of(store)
    put(store, b"a", 10_000)
    grant = lease(loans, b"a")
    assert grant.refusal is None
    assert grant.nbytes == 10_000
    store.delete([b"a"])
    for number in range(2 * CAPACITY // (100 * 1024)):  # all that could be reused is
        put(store, b"b%d" % number, 100 * 1024)
    (offset, _), *_ = grant.pieces
    assert bytes(store.table.pool.views([(offset // PAGE_BYTES, 1)], 1)[0]) == b"a"  # type: ignore[list-item]
    assert loans.release(grant.number)
    assert not loans.release(grant.number)


def test_an_upload_is_seen_once_it_is_committed_and_not_before(store: Tiered) -> None:
    loans = loans_of(store)
    grant = loans.reserve(b"a", 10_000)
    assert grant.refusal is None
    assert grant.nbytes == 10_000
    assert store.length(b"a") is None
    assert loans.commit(grant.number) is Published.STORED
    assert store.length(b"a") == 10_000
    assert loans.commit(grant.number) is None


def test_a_lease_cannot_be_committed_nor_an_upload_released(store: Tiered) -> None:
    loans = loans_of(store)
    put(store, b"a", 1000)
    leased, arriving = lease(loans, b"a").number, loans.reserve(b"b", 1000).number
    assert not loans.abandon(leased)
    assert loans.commit(leased) is None
    assert not loans.release(arriving)
    assert loans.release(leased)
    assert loans.abandon(arriving)
    assert len(loans) == 0


def test_one_connection_holds_at_most_an_eighth(store: Tiered) -> None:
    loans = loans_of(store)
    put(store, b"a", CAPACITY // 16)
    grants = [lease(loans, b"a") for _ in range(3)]
    assert [grant.refusal for grant in grants] == [None, None, Refusal.BUSY]
    assert loans.reserve(b"b", 1).refusal is Refusal.BUSY
    loans.release(grants[0].number)
    assert lease(loans, b"a").refusal is None


def test_the_first_loan_may_be_larger_so_that_small_stores_lend_too(store: Tiered) -> None:
    loans = loans_of(store)
    put(store, b"a", CAPACITY // 4)
    assert lease(loans, b"a").refusal is None
    assert lease(loans, b"a").refusal is Refusal.BUSY


def test_all_connections_together_hold_at_most_half(store: Tiered) -> None:
    put(store, b"a", CAPACITY // 4)
    many = [loans_of(store) for _ in range(3)]
    assert [lease(loans, b"a").refusal for loans in many] == [None, None, Refusal.BUSY]
    many[0].close()
    assert lease(many[2], b"a").refusal is None


def test_the_number_of_loans_is_bounded(store: Tiered) -> None:
    loans = loans_of(store)
    put(store, b"a", 1)
    assert all(lease(loans, b"a").refusal is None for _ in range(MAX_NUMBERS))
    assert lease(loans, b"a").refusal is Refusal.BUSY
    assert loans.reserve(b"b", 1).refusal is Refusal.BUSY


def test_a_full_store_refuses_uploads_without_waiting(store: Tiered) -> None:
    others = [store.table.reserve(MIB) for _ in range(4)]
    assert None not in others
    assert loans_of(store).reserve(b"b", 1000).refusal is Refusal.NO_ROOM
    assert store.lent.taken_bytes == 0


def test_everything_ends_with_the_connection(store: Tiered) -> None:
    loans = loans_of(store)
    put(store, b"a", 10_000)
    for _ in range(3):
        lease(loans, b"a")
        loans.reserve(b"b", 10_000)
    store.delete([b"a"])
    loans.close()
    stats = store.table.stats()
    assert (stats.used_bytes, stats.uploading_bytes, store.lent.taken_bytes, len(loans)) == (0, 0, 0, 0)
    assert store.length(b"b") is None


def test_overdue_is_the_oldest_that_is_still_held(store: Tiered) -> None:
    clock = Clock()
    loans = loans_of(store, clock)
    put(store, b"a", 100)
    first = lease(loans, b"a").number
    clock.now += 20
    second = loans.reserve(b"b", 100).number
    clock.now += 11
    assert loans.overdue(clock.now)
    loans.release(first)
    assert not loans.overdue(clock.now)
    clock.now += 20
    assert loans.overdue(clock.now)
    loans.commit(second)
    assert not loans.overdue(clock.now + 1000)


def test_numbers_start_over_and_spare_those_in_use(store: Tiered) -> None:
    loans = loans_of(store)
    put(store, b"a", 100)
    first = lease(loans, b"a").number
    loans._number = 2**32 - 2
    assert [lease(loans, b"a").number for _ in range(2)] == [2**32 - 1, first + 1]


def test_many_keys_are_leased_at_once_each_as_it_is(store: Tiered) -> None:
    loans = loans_of(store)
    put(store, b"a", 1000)
    put(store, b"b", 2000)
    grants = loans.lease([b"a", b"nothing", b"b", b"a"])
    assert [grant.nbytes for grant in grants] == [1000, 0, 2000, 1000]
    assert [grant.refusal for grant in grants] == [None, Refusal.ABSENT, None, None]
    assert len(loans) == 3
    loans.close()
    assert store.delete([b"a", b"b"]) == 2
    assert store.table.stats().used_bytes == 0


def test_a_lease_that_ends_in_an_error_leaves_none_behind() -> None:
    tier = FakeTier()
    tier.values[b"below"] = b"v"
    tier.error = MemoryError()
    store = Tiered(Table(CAPACITY, max_items=10_000), [tier])
    put(store, b"here", 1000)
    loans = loans_of(store)
    with pytest.raises(MemoryError):
        loans.lease([b"here", b"below", b"here", b"absent"])
    loans.close()
    store.delete([b"here"])
    assert is_empty(store.table)
    store.table.close()
