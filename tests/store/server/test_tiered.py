"""One store over several tiers: what is below is found and lifted, and nothing that was overwritten or deleted comes
back, whatever was under way.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from kvhearth.store.dram.allocator import PAGE_BYTES
from kvhearth.store.dram.events import EventKind
from kvhearth.store.dram.rules import Rules
from kvhearth.store.dram.table import Published, Table
from kvhearth.store.server.tiered import Tiered, order_below

from ..fakes import FakeTier, eventually, get, in_threads, put
from .conftest import PAGES, StartTiered


def lifts(store: Tiered, outcome: str) -> float:
    families = {family.metric.name: dict(family.samples) for family in store.metrics()}
    return sum(number for (_, what), number in families["kvhearth_store_lifts"].items() if what == outcome)


def is_idle(store: Tiered) -> bool:
    families = {family.metric.name: dict(family.samples) for family in store.metrics()}
    return not sum(families["kvhearth_store_save_queue_bytes"].values())


def leave_memory(store: Tiered, key: bytes) -> None:
    """Drive a value that is saved already out of memory."""
    eventually(lambda: is_idle(store))
    for number in range(2 * PAGES):
        put(store, b"filler %d" % number, bytes(PAGE_BYTES), ttl_seconds=60.0)
    assert store.table.length(key) is None
    store.table.delete([b"filler %d" % number for number in range(2 * PAGES)])


class TestFinding:
    def test_a_store_without_lower_tiers_is_its_memory(self, start: StartTiered) -> None:
        store = start()
        assert put(store, b"a", b"1") is Published.STORED
        assert store.where([b"a", b"b"]) == b"d-"
        assert store.leading([b"a", b"b", b"a"]) == b"d"
        assert get(store, b"a") == b"1"
        assert store.count() == 1
        assert store.delete([b"a", b"a", b"b"]) == 1

    def test_each_key_is_in_the_quickest_tier_that_has_it(self, start: StartTiered) -> None:
        disk, objects = FakeTier(), FakeTier("object", b"o")
        disk.values.update({b"b": b"1", b"a": b"1"})
        objects.values.update({b"b": b"1", b"c": b"1"})
        store = start(disk, objects, read_ahead=False)
        put(store, b"a", b"2")
        assert store.where([b"a", b"b", b"c", b"absent", b"b"]) == b"dko-k"
        assert store.leading([b"a", b"b", b"c", b"absent", b"b"]) == b"dko"
        assert store.leading([b"absent", b"a"]) == b""
        assert [store.length(key) for key in (b"a", b"c", b"absent")] == [1, 1, None]

    def test_a_value_from_below_is_lifted_and_stays_below(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.values[b"k"] = b"value" * 500
        store = start(tier)
        assert get(store, b"k") == b"value" * 500
        assert store.where([b"k"]) == b"d"
        assert tier.values == {b"k": b"value" * 500}
        assert get(store, b"k") == b"value" * 500
        assert tier.reads == [b"k"]
        assert list(store.table.events.since(0, 9) or ()) == [(EventKind.PUT, b"d", b"k")]

    def test_many_who_want_the_same_lift_it_once(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.values[b"k"] = b"v"
        store = start(tier)
        tier.before_read.shut()
        found: list[bytes | None] = []

        def open_when_all_wait() -> None:
            tier.before_read.await_arrival()
            tier.before_read.open()

        in_threads(*[lambda: found.append(get(store, b"k"))] * 8, open_when_all_wait)
        assert found == [b"v"] * 8
        assert tier.reads == [b"k"]

    def test_the_slower_tier_helps_out_when_the_quicker_one_fails(self, start: StartTiered) -> None:
        disk, objects = FakeTier(), FakeTier("object", b"o")
        disk.values[b"k"] = objects.values[b"k"] = b"v"
        disk.fails = True
        store = start(disk, objects)
        assert get(store, b"k") == b"v"
        assert lifts(store, "missed") == 1
        assert lifts(store, "lifted") == 1

    @pytest.mark.parametrize("fault", ["lost", "too long", "fails", "down"])
    def test_what_cannot_be_read_is_a_miss(self, start: StartTiered, fault: str) -> None:
        tier = FakeTier()
        tier.values[b"k"] = b"v"
        store = start(tier)
        tier.says_too_long, tier.fails, tier.is_down = fault == "too long", fault == "fails", fault == "down"
        if fault == "lost":
            tier.before_read.shut()
            losing = threading.Thread(target=lambda: (tier.before_read.await_arrival(), tier.values.clear()))
            losing.start()
            opening = threading.Thread(target=lambda: (losing.join(), tier.before_read.open()))
            opening.start()
        assert get(store, b"k") is None
        assert store.table.stats().uploading_bytes == 0

    def test_a_tier_that_raises_after_all_costs_no_memory_and_no_thread(self, start: StartTiered) -> None:
        tier = FakeTier()
        keys = [b"%d" % number for number in range(8)]
        tier.values.update(dict.fromkeys(keys, b"v"))
        store = start(tier)
        tier.error = MemoryError()
        with pytest.raises(MemoryError):
            get(store, keys[0])
        store.prefetch(keys)
        eventually(lambda: len(tier.reads) == 9)
        tier.error = None
        eventually(lambda: store.table.stats().uploading_bytes == 0)
        store.prefetch(keys)
        eventually(lambda: store.where(keys) == b"d" * 8)

    def test_a_value_that_finds_no_room_in_memory_is_a_miss(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.values[b"k"] = bytes(PAGE_BYTES * PAGES)
        store = start(tier)
        assert get(store, b"k") is None
        assert lifts(store, "no_room") == 1

    def test_a_stalled_tier_costs_a_reader_its_time_limit_and_others_nothing(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.values[b"below"] = b"v"
        store = start(tier, read_seconds=0.2)
        put(store, b"here", b"v")
        tier.before_read.shut()
        waiting = threading.Thread(target=lambda: results.append(get(store, b"below")))
        results: list[bytes | None] = []
        waiting.start()
        tier.before_read.await_arrival()
        assert get(store, b"here") == b"v"
        assert put(store, b"more", b"v") is Published.STORED
        assert put(store, b"below", b"new") is Published.STORED
        assert store.where([b"here", b"below"]) == b"dd"
        waiting.join(10.0)
        assert results in ([None], [b"new"])

    def test_there_are_as_many_values_as_keys_wherever_they_are(self, start: StartTiered) -> None:
        disk, objects = FakeTier(), FakeTier("object", b"o")
        store = start(disk, objects, write_through=True)
        for number in range(10):
            put(store, b"%d" % number, b"v")
            eventually(lambda: is_idle(store))
        assert store.count() == 10
        leave_memory(store, b"1")
        assert store.count() == 10
        get(store, b"1")
        assert store.count() == 10


class TestLiftingAhead:
    def test_what_a_question_found_below_is_lifted_before_it_is_asked_for(self, start: StartTiered) -> None:
        tier = FakeTier()
        chain = [b"chunk %d" % number for number in range(20)]
        tier.values.update(dict.fromkeys(chain[:12], b"v"))
        store = start(tier)
        assert store.leading(chain) == b"k" * 12
        eventually(lambda: store.where(chain, touch=False) == b"d" * 12 + b"-" * 8)

    def test_a_store_that_is_told_not_to_does_not(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.values[b"k"] = b"v"
        store = start(tier, read_ahead=False)
        assert store.leading([b"k"]) == b"k"
        assert store.prefetch([b"k"]) == 1  # until it is asked to
        eventually(lambda: store.where([b"k"]) == b"d")
        assert tier.reads == [b"k"]

    def test_a_prefetch_counts_what_is_there_or_on_its_way(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.values.update({b"a": b"1", b"b": b"2"})
        store = start(tier)
        put(store, b"c", b"3")
        assert store.prefetch([b"a", b"b", b"c", b"absent"]) == 3
        eventually(lambda: store.where([b"a", b"b"]) == b"dd")

    def test_what_waits_to_be_lifted_is_bounded(self, start: StartTiered) -> None:
        tier = FakeTier()
        keys = [b"%d" % number for number in range(6000)]
        tier.values.update(dict.fromkeys(keys, b"v"))
        store = start(tier)
        tier.before_read.shut()
        assert store.prefetch(keys) == 4096
        for _ in range(4):
            tier.before_read.await_arrival()
        assert store.prefetch(keys) <= 4
        tier.before_read.open()

    def test_a_prefetch_of_what_is_deleted_meanwhile_brings_nothing_back(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.values[b"k"] = b"v"
        store = start(tier)
        tier.after_read.shut()
        store.prefetch([b"k"])
        tier.after_read.await_arrival()
        assert store.delete([b"k"]) == 1
        tier.after_read.open()
        eventually(lambda: lifts(store, "not_kept") == 1)
        assert store.where([b"k"]) == b"-"


class TestConditions:
    @pytest.mark.parametrize("is_below", [True, False])
    def test_only_if_absent_means_in_every_tier(self, start: StartTiered, is_below: bool) -> None:
        tier = FakeTier()
        if is_below:
            tier.values[b"k"] = b"old"
        store = start(tier)
        expected = Published.UNWANTED if is_below else Published.STORED
        assert put(store, b"k", b"new", only_if_present=False) is expected
        assert get(store, b"k") == (b"old" if is_below else b"new")
        assert put(store, b"k", b"newer", only_if_present=False) is Published.UNWANTED

    @pytest.mark.parametrize("is_below", [True, False])
    def test_only_if_present_means_in_any_tier(self, start: StartTiered, is_below: bool) -> None:
        tier = FakeTier()
        if is_below:
            tier.values[b"k"] = b"old"
        store = start(tier)
        expected = Published.STORED if is_below else Published.UNWANTED
        assert put(store, b"k", b"new", only_if_present=True) is expected
        assert get(store, b"k") == (b"new" if is_below else None)

    def test_a_put_that_is_refused_leaves_no_old_value_anywhere(self, start: StartTiered) -> None:
        tier = FakeTier()
        table = Table(PAGES * PAGE_BYTES, 10, rules=Rules(policy="lru", namespace_quota_bytes=100))
        store = Tiered(table, [tier])
        tier.values[b"n:k"] = b"old"
        assert put(store, b"n:k", bytes(200)) is Published.OVER_QUOTA
        assert get(store, b"n:k") is None
        table.close()


class TestNothingComesBack:
    def test_an_overwritten_or_deleted_value_is_gone_from_below(self, start: StartTiered) -> None:
        disk, objects = FakeTier(), FakeTier("object", b"o")
        disk.values.update({b"a": b"old", b"b": b"old"})
        objects.values.update({b"a": b"old", b"c": b"old"})
        store = start(disk, objects)
        put(store, b"a", b"new")
        assert store.delete([b"a", b"b", b"c", b"absent", b"b"]) == 3
        assert not disk.values
        assert not objects.values
        told = list(store.table.events.since(0, 99) or ())
        assert (EventKind.EVICT, b"o", b"c") in told
        assert store.where([b"a", b"b", b"c"]) == b"---"

    def test_what_was_changed_while_a_tier_was_down_is_gone_when_it_is_up_again(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.values.update({b"a": b"old", b"b": b"old", b"c": b"other"})
        store = start(tier)
        tier.is_down = True
        put(store, b"a", b"new")
        store.delete([b"b"])
        tier.is_down = False
        assert store.where([b"a", b"b", b"c"]) == b"d-k"
        assert tier.values == {b"c": b"other"}

    def test_what_was_changed_before_a_tier_had_found_it_is_not_found_later(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.values.update({b"a": b"old", b"b": b"old", b"c": b"other"})
        tier.unfound, tier.ready = set(tier.values), False
        store = start(tier)
        put(store, b"a", b"new")
        store.delete([b"b"])
        tier.unfound, tier.ready = set(), True
        assert store.where([b"a", b"b", b"c"]) == b"d-k"
        assert tier.values == {b"c": b"other"}

    @pytest.mark.parametrize("stands", ["before_write", "after_write"])
    @pytest.mark.parametrize("change", ["overwrite", "delete", "clear", "expire"])
    def test_not_when_it_was_being_saved(self, start: StartTiered, change: str, stands: str) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        getattr(tier, stands).shut()
        put(store, b"k", b"old")
        getattr(tier, stands).await_arrival()
        self.change(store, change)
        assert get(store, b"k") == {"overwrite": b"new", "expire": b"old"}.get(change)  # and nothing waits for the tier
        store.table.delete([b"k"])  # as if it had to go
        assert get(store, b"k") is None
        getattr(tier, stands).open()
        eventually(lambda: is_idle(store))
        assert get(store, b"k") is None
        assert not tier.values

    @pytest.mark.parametrize("change", ["overwrite", "delete", "clear", "expire"])
    def test_not_when_it_came_to_lie_below_after_the_change(self, start: StartTiered, change: str) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        tier.before_write.shut()
        tier.after_write.shut()
        put(store, b"k", b"old")
        tier.before_write.await_arrival()
        self.change(store, change)
        store.table.delete([b"k"])  # as if it had to go
        tier.before_write.open()
        tier.after_write.await_arrival()
        assert tier.values == {b"k": b"old"}
        assert get(store, b"k") is None
        assert store.prefetch([b"k"]) <= 1
        tier.after_write.open()
        eventually(lambda: is_idle(store) and not tier.values)
        assert get(store, b"k") is None

    @pytest.mark.parametrize("change", ["overwrite", "delete", "expire"])
    def test_not_while_it_is_about_to_be_deleted_below(self, start: StartTiered, change: str) -> None:
        tier = FakeTier()
        tier.values[b"k"] = b"old"
        store = start(tier)
        tier.before_delete.shut()
        changing = threading.Thread(target=lambda: self.change(store, change))
        changing.start()
        tier.before_delete.await_arrival()
        store.table.delete([b"k"])  # as if it had to go
        assert get(store, b"k") is None
        tier.before_delete.open()
        changing.join(10.0)
        assert get(store, b"k") is None

    @pytest.mark.parametrize("stands", ["before_read", "after_read"])
    @pytest.mark.parametrize("change", ["overwrite", "delete", "clear"])
    def test_not_when_it_was_being_lifted(self, start: StartTiered, change: str, stands: str) -> None:
        tier = FakeTier()
        tier.values[b"k"] = b"old"
        store = start(tier)
        getattr(tier, stands).shut()
        results: list[bytes | None] = []
        reading = threading.Thread(target=lambda: results.append(get(store, b"k")))
        reading.start()
        getattr(tier, stands).await_arrival()
        self.change(store, change)
        store.table.delete([b"k"])  # as if it had to go
        getattr(tier, stands).open()
        reading.join(10.0)
        assert results == [None]
        assert get(store, b"k") is None

    def change(self, store: Tiered, change: str) -> None:
        if change == "overwrite":
            assert put(store, b"k", b"new", ttl_seconds=60.0) is Published.STORED
        elif change == "delete":
            assert store.delete([b"k"]) == 1
        elif change == "expire":
            assert store.expire(b"k", 60.0)
        else:
            store.clear()

    def test_a_value_that_is_given_an_end_has_none_below(self, start: StartTiered) -> None:
        tier = FakeTier()
        tier.values[b"k"] = b"v"
        store = start(tier)
        assert store.expire(b"k", 60.0)
        assert not store.expire(b"absent", 60.0)
        assert not tier.values
        assert get(store, b"k") == b"v"

    @pytest.mark.parametrize("stands", ["before_write", "after_write"])
    def test_a_value_that_is_given_an_end_while_it_is_saved_has_none_below(
        self, start: StartTiered, stands: str
    ) -> None:
        tier = FakeTier()
        store = start(tier, write_through=True)
        getattr(tier, stands).shut()
        put(store, b"k", b"v")
        getattr(tier, stands).await_arrival()
        assert store.expire(b"k", 60.0)
        getattr(tier, stands).open()
        eventually(lambda: is_idle(store))
        assert not tier.values
        assert get(store, b"k") == b"v"

    def test_a_reader_never_sees_less_than_what_was_put_before_it_began(self, start: StartTiered) -> None:
        """One writer a key puts ever higher numbers, deletes at times, and memory is so short that all is on the move
        between three tiers."""
        disk, objects = FakeTier(), FakeTier("object", b"o")
        store = start(disk, objects, pages=24)
        disk.seconds, objects.seconds = 0.0005, 0.001
        keys = [b"key %d" % number for number in range(24)]
        least = dict.fromkeys(keys, 0)
        running = threading.Event()
        running.set()

        def write(own: list[bytes], seed: int) -> None:
            choices = random.Random(seed)
            for number in range(1, 700):
                key = choices.choice(own)
                if choices.random() < 0.2:
                    store.delete([key])
                    least[key] = number
                elif put(store, key, (b"%s=%d " % (key, number)).ljust(PAGE_BYTES * 2)) is Published.STORED:
                    least[key] = number

        def read(seed: int) -> None:
            choices = random.Random(seed)
            while running.is_set():
                key = choices.choice(keys)
                least_number = least[key]
                value = get(store, key)
                if value is not None:
                    name, number = value.strip().split(b"=")
                    assert name == key
                    assert int(number) >= least_number
                time.sleep(0)

        def write_all() -> None:
            try:
                in_threads(*(lambda part=part: write(keys[part::3], part) for part in range(3)))
            finally:
                running.clear()

        in_threads(write_all, *(lambda seed=seed: read(seed) for seed in range(3)))
        for key in keys:
            value = get(store, key)
            assert value is None or int(value.strip().split(b"=")[1]) >= least[key]


class TestListing:
    def walk(self, store: Tiered) -> Iterator[bytes]:
        """As SCAN does: memory, then what is below."""
        cursor = 0
        while True:
            keys, cursor = store.table.keys_from(cursor, 4)
            yield from keys
            if not cursor:
                break
        while True:
            keys, cursor = store.keys_below(cursor, 4)
            yield from keys
            if not cursor:
                break

    def test_what_was_put_and_is_in_several_tiers_is_listed_once(self, start: StartTiered) -> None:
        disk, objects = FakeTier(), FakeTier("object", b"o")
        store = start(disk, objects, write_through=True)
        keys = [b"%d" % number for number in range(30)]
        for key in keys:
            put(store, key, b"v")
            eventually(lambda: is_idle(store))
        objects.values[b"elsewhere"] = b"v"
        assert sorted(self.walk(store)) == sorted([*keys, b"elsewhere"])
        assert store.keys_below(0, 1000)[1] == 0

    def test_what_is_there_all_the_while_is_met_whatever_moves_around_it(self, start: StartTiered) -> None:
        tier = FakeTier()
        store = start(tier)
        keys = {b"%d" % number for number in range(150)}
        for key in sorted(keys):
            put(store, key, bytes(PAGE_BYTES))
            eventually(lambda: not store.table.is_low)
        running = threading.Event()
        running.set()

        def stir() -> None:
            choices = random.Random(1)
            while running.is_set():
                get(store, b"%d" % choices.randrange(150))
                eventually(lambda: not store.table.is_low)
                put(store, b"passing", b"v", ttl_seconds=60.0)
                store.delete([b"passing"])

        def list_all() -> None:
            try:
                for _ in range(20):
                    assert keys <= set(self.walk(store))
            finally:
                running.clear()

        in_threads(stir, list_all)

    def test_a_walk_goes_on_where_it_was_when_another_has_begun_or_ended(self, start: StartTiered) -> None:
        tier = FakeTier()
        keys = sorted((b"%d" % number for number in range(50)), key=order_below)
        tier.values.update(dict.fromkeys(keys, b"v"))
        store = start(tier)
        first, cursor = store.keys_below(0, 20)
        assert first == keys[:20]
        assert list(self.walk(store)) == keys
        assert store.keys_below(cursor, 30) == (keys[20:], 0)
