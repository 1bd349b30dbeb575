"""Values reach the tiers below before they leave memory, and no tier makes a put wait."""

from __future__ import annotations

import threading

from kvhearth.store.dram.allocator import PAGE_BYTES
from kvhearth.store.dram.events import EventKind
from kvhearth.store.dram.table import Published
from kvhearth.store.server.tiered import Tiered

from ..fakes import FakeTier, eventually, get, in_threads, is_empty, put
from .conftest import PAGES, StartTiered


def key(number: int) -> bytes:
    return b"space:%04d" % number


def value(number: int, pages: int = 1) -> bytes:
    return (b"value %04d;" % number * (pages * PAGE_BYTES))[: pages * PAGE_BYTES]


def outcomes(store: Tiered) -> dict[tuple[str, ...], float]:
    families = {family.metric.name: dict(family.samples) for family in store.metrics()}
    return families["kvhearth_store_saves"]


def queued_bytes(store: Tiered) -> float:
    families = {family.metric.name: dict(family.samples) for family in store.metrics()}
    return sum(families["kvhearth_store_save_queue_bytes"].values())


def all_are_there(store: Tiered, numbers: int) -> bool:
    """Whether each value is what was put; read no faster than memory is made for what is lifted."""
    for number in range(numbers):
        eventually(lambda: not store.table.is_low)
        if get(store, key(number)) != value(number):
            return False
    return True


class TestWriteBack:
    def test_what_leaves_memory_is_saved_before_it_goes(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier)
        for number in range(3 * PAGES):
            assert put(store, key(number), value(number)) is Published.STORED
            eventually(lambda: not store.table.is_low)
        assert store.table.stats().items < PAGES
        assert all_are_there(store, 3 * PAGES)

    def test_what_is_not_about_to_go_is_not_saved(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier)
        for number in range(PAGES // 2):
            put(store, key(number), value(number))
        assert not tier.writes

    def test_only_as_many_are_let_go_as_it_takes(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, pages=160)
        tier.before_write.shut()
        for number in range(151):  # less than a sixteenth, ten pages, is free
            put(store, key(number), value(number))
        tier.before_write.await_arrival()
        tier.before_write.open()
        eventually(lambda: not store.table.is_low and not queued_bytes(store))
        assert len(store.table) == 150
        assert len(tier.values) == 1

    def test_many_small_values_are_saved_when_no_more_items_may_be_held(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, pages=1024, max_items=64)
        for number in range(200):
            put(store, key(number), value(number))
            eventually(lambda: not store.table.is_low)
        assert len(store.table) < 64
        assert all_are_there(store, 200)

    def test_what_is_saved_already_is_not_saved_again(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier)
        for _ in range(3):
            for number in range(2 * PAGES):
                if get(store, key(number)) is None:
                    put(store, key(number), value(number))
                eventually(lambda: not store.table.is_low)
        assert len(tier.writes) == len(set(tier.writes))

    def test_what_a_tier_has_dropped_since_is_saved_again_before_it_leaves_memory(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        for number in range(8):
            put(store, key(number), value(number))
            eventually(lambda: not queued_bytes(store))
        tier.values.clear()
        for number in range(8, 2 * PAGES):
            put(store, key(number), value(number))
            eventually(lambda: not store.table.is_low)
        eventually(lambda: not queued_bytes(store))
        assert tier.values.keys() >= {key(number) for number in range(8)}

    def test_a_value_that_is_being_sent_stays_while_it_is_saved_and_after(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier)
        tier.before_write.shut()
        put(store, key(0), value(0))
        for number in range(1, PAGES - 3):
            put(store, key(number), value(number))
        tier.before_write.await_arrival()
        slot = store.table.lease(tier.writes[0])
        assert slot is not None
        tier.before_write.open()
        eventually(lambda: not store.table.is_low and not queued_bytes(store))
        assert b"".join(store.table.views(slot)) == value(0)
        assert store.table.present_quietly([key(0)]) == [True]
        store.table.release(slot)

    def test_a_value_that_was_pinned_while_it_was_saved_stays(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier)
        tier.before_write.shut()
        for number in range(PAGES - 3):
            put(store, key(number), value(number))
        tier.before_write.await_arrival()
        assert store.table.pin([tier.writes[0]]) == 1
        tier.before_write.open()
        eventually(lambda: not store.table.is_low and not queued_bytes(store))
        assert store.table.present_quietly([key(0)]) == [True]


class TestWriteThrough:
    def test_each_value_is_saved_when_it_is_put(self, start: StartTiered) -> None:
        tiers = FakeTier(), FakeTier("object", b"o")
        store = start(*tiers, write_through=True)
        for number in range(20):
            put(store, key(number), value(number))
            eventually(lambda: not queued_bytes(store))
        for tier in tiers:
            assert tier.values == {key(number): value(number) for number in range(20)}
        assert outcomes(store)["object", "saved"] == 20

    def test_a_value_put_anew_while_the_old_one_is_saved_is_saved_after_it(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        tier.before_write.shut()
        put(store, b"k", b"old")
        tier.before_write.await_arrival()
        put(store, b"k", b"new")
        tier.before_write.open()
        eventually(lambda: tier.values.get(b"k") == b"new" and not queued_bytes(store))


class TestAdmission:
    def test_a_value_seen_once_goes_without_being_saved_when_two_sights_are_asked_for(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, min_sights=2)
        for number in range(PAGES - 8):
            put(store, key(number), value(number))
        seen_again = [key(number) for number in range(0, PAGES - 8, 2)]
        store.where(seen_again)
        for number in range(PAGES, 3 * PAGES):
            put(store, key(number), value(number))
            eventually(lambda: not store.table.is_low)
        eventually(lambda: not queued_bytes(store))
        assert sorted(tier.values) == seen_again

    def test_a_second_put_is_a_second_sight(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True, min_sights=2)
        put(store, b"k", b"v")
        put(store, b"other", b"v")
        put(store, b"k", b"v")
        eventually(lambda: tier.values)
        assert list(tier.values) == [b"k"]

    def test_a_value_with_a_life_of_its_own_stays_in_memory(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        put(store, b"brief", b"v", ttl_seconds=60.0)
        put(store, b"k", b"v")
        eventually(lambda: tier.values)
        store.close(flush_seconds=5.0)
        assert list(tier.values) == [b"k"]


class TestTiersThatMisbehave:
    def test_a_stalled_tier_makes_no_put_wait_and_holds_no_more_than_its_queue(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier)
        tier.before_write.shut()
        for number in range(10 * PAGES):
            assert put(store, key(number), value(number)) is Published.STORED
        assert queued_bytes(store) <= PAGES * PAGE_BYTES // 8
        assert len(tier.writes) <= 2  # its threads; they have not come back
        assert get(store, key(10 * PAGES - 1)) == value(10 * PAGES - 1)

    def test_a_tier_that_is_down_is_left_alone_until_it_is_up_again(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier)
        tier.is_down = True
        for number in range(3 * PAGES):
            assert put(store, key(number), value(number)) is Published.STORED
        assert not tier.writes
        tier.is_down = False
        for number in range(3 * PAGES, 4 * PAGES):
            put(store, key(number), value(number))
        eventually(lambda: tier.values)

    def test_a_tier_that_fails_loses_its_values_only(self, start: StartTiered) -> None:
        bad, good = FakeTier(), FakeTier("object", b"o")
        store = start(bad, good)
        bad.fails = True
        for number in range(2 * PAGES):
            assert put(store, key(number), value(number)) is Published.STORED
            eventually(lambda: not store.table.is_low)
        eventually(lambda: not queued_bytes(store))
        assert not bad.values
        assert all_are_there(store, 2 * PAGES)
        assert outcomes(store)["disk", "refused"] >= PAGES

    def test_a_tier_that_raises_after_all_loses_its_values_only(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        tier.error = MemoryError()
        for number in range(4):
            put(store, key(number), value(number))
            eventually(lambda: not queued_bytes(store))
        assert outcomes(store)["disk", "refused"] == 4
        tier.error = None
        put(store, b"k", b"v")
        eventually(lambda: tier.values == {b"k": b"v"})

    def test_a_slow_tier_gets_what_it_can(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.seconds = 0.002
        store = start(tier)
        for number in range(5 * PAGES):
            assert put(store, key(number), value(number)) is Published.STORED
        eventually(lambda: not queued_bytes(store))
        for number in range(5 * PAGES):
            assert get(store, key(number)) in (None, value(number))


class TestTheEnd:
    def test_what_only_memory_has_is_saved_at_an_orderly_stop(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier)
        for number in range(PAGES // 2):
            put(store, key(number), value(number))
        store.close(flush_seconds=10.0)
        assert tier.values == {key(number): value(number) for number in range(PAGES // 2)}

    def test_a_stop_does_not_wait_for_a_tier_that_is_down(self, start: StartTiered) -> None:
        tier, down = FakeTier(), FakeTier("object", b"o")
        store = start(tier, down)
        down.is_down = True
        for number in range(PAGES // 2):
            put(store, key(number), value(number))
        assert store._mover is not None
        assert store._mover.flush(5.0)
        assert len(tier.values) == PAGES // 2

    def test_a_stop_gives_up_on_a_stalled_tier(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier)
        tier.before_write.shut()
        for number in range(PAGES // 2):
            put(store, key(number), value(number))
        assert store._mover is not None
        assert not store._mover.flush(0.05)

    def test_what_waits_when_it_is_closed_is_let_go(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        tier.before_write.shut()
        for number in range(8):
            put(store, key(number), value(number))
        tier.before_write.await_arrival()
        closing = threading.Thread(target=store.close, daemon=True)
        closing.start()
        tier.before_write.open()
        closing.join(10.0)
        assert not closing.is_alive()
        assert queued_bytes(store) == 0  # and no lease is left, as is looked at after every test

    def test_a_closed_mover_takes_nothing_more(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        store.close()
        assert put(store, b"k", b"v") is Published.STORED
        assert not tier.values


class TestEvents:
    def test_what_is_saved_is_told_with_the_tier_and_never_after_its_deletion(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        events = store.table.events
        put(store, b"k", b"v")
        eventually(lambda: tier.values)
        eventually(lambda: (EventKind.PUT, b"k", b"k") in (events.since(0, 100) or ()))
        store.delete([b"k"])
        assert list(events.since(0, 100) or ())[-1] == (EventKind.EVICT, b"k", b"k")

    def test_a_save_that_came_too_late_is_not_told(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        tier.after_write.shut()
        put(store, b"k", b"v")
        tier.after_write.await_arrival()
        store.delete([b"k"])
        tier.after_write.open()
        eventually(lambda: not queued_bytes(store))
        assert (EventKind.PUT, b"k", b"k") not in (store.table.events.since(0, 100) or ())


def test_many_who_put_at_once_lose_no_memory(start: StartTiered) -> None:
    tier = FakeTier()
    store = start(tier, write_through=True)

    def put_many(first: int) -> None:
        for number in range(first, first + 200):
            put(store, key(number % 50), value(number, pages=1 + number % 3))

    in_threads(*(lambda first=first: put_many(first) for first in range(0, 800, 200)))
    store.delete([key(number) for number in range(50)])
    eventually(lambda: not queued_bytes(store))
    eventually(lambda: is_empty(store.table))
    assert not tier.values
