"""A key has one slot while it is held, and a walk over the slots misses none of those that stay."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvhearth.store.dram.index import Index, fingerprint_of

SLOTS = 6
keys = st.sampled_from([bytes([letter]) for letter in b"abcdefgh"])


class AgainstTwoDicts(RuleBasedStateMachine):
    """The reference: which key is in which slot, and which slots are hidden and not yet given back."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(SLOTS)
        self.held: dict[bytes, int] = {}
        self.hidden: dict[int, bytes] = {}

    @rule(key=keys)
    def take(self, key: bytes) -> None:
        if key in self.held:
            return
        slot = self.index.take(key)
        if len(self.held) + len(self.hidden) == SLOTS:
            assert slot is None
        else:
            assert slot is not None
            assert slot not in {*self.held.values(), *self.hidden}
            assert self.index.facts.fingerprint[slot] == xxhash.xxh3_64_intdigest(key)
            self.held[key] = slot

    @rule(key=keys)
    def hide(self, key: bytes) -> None:
        if key in self.held:
            slot = self.held.pop(key)
            self.index.hide(slot)
            self.hidden[slot] = key

    @rule()
    def give_back(self) -> None:
        if self.hidden:
            slot, _ = self.hidden.popitem()
            self.index.give_back(slot)
            with pytest.raises(KeyError):
                self.index.key_of(slot)

    @rule(most=st.integers(1, 4))
    def walk(self, most: int) -> None:
        found, cursor = self.index.keys_from(0, most)
        while cursor:
            more, cursor = self.index.keys_from(cursor, most)
            found += more
        assert sorted(found) == sorted(self.held)  # each once, also when an older value of it is still being sent

    @invariant()
    def it_is_as_the_reference(self) -> None:
        assert self.index.slot_of == self.held
        assert len(self.index) == len(self.held)
        assert self.index.top <= SLOTS
        for key, slot in self.held.items():
            assert self.index.key_of(slot) == key
        for slot, key in self.hidden.items():
            assert self.index.key_of(slot) == key


AgainstTwoDicts.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestAgainstTwoDicts = AgainstTwoDicts.TestCase


def test_a_walk_meets_what_is_there_all_the_while() -> None:
    index = Index(40)
    staying = [b"stays %d" % number for number in range(20)]
    for key in staying:
        index.take(key)
    met, cursor = index.keys_from(0, 3)
    for number in range(40):
        if number % 2 == 0:
            slot = index.take(b"passing %d" % number)
            assert slot is not None
            index.hide(slot)
            index.give_back(slot)
        if cursor:
            more, cursor = index.keys_from(cursor, 3)
            met += more
    assert sorted(met) == sorted(staying)


def test_no_fingerprint_is_zero() -> None:
    assert fingerprint_of(b"k") == xxhash.xxh3_64_intdigest(b"k") != 0
