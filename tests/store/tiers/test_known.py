"""What a node knows of a bucket against a dict: puts, deletions and listings that renew the picture."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvhearth.store.tiers.bucket import Listed
from kvhearth.store.tiers.files import file_bytes
from kvhearth.store.tiers.known import Known

MOST = 6
KEYS = st.sampled_from([b"k%d" % number for number in range(10)])
ITEMS = st.builds(Listed, KEYS, st.integers(0, 2**40), st.integers(0, 2**33))


class KnownMachine(RuleBasedStateMachine):
    """The one known longest is forgotten beyond the bound."""

    def __init__(self) -> None:
        super().__init__()
        self.known = Known(MOST)
        self.model: dict[bytes, Listed] = {}

    def learn(self, item: Listed) -> None:
        if item.key not in self.model and len(self.model) == MOST:
            del self.model[next(iter(self.model))]
        self.model[item.key] = item

    @rule(item=ITEMS)
    def add(self, item: Listed) -> None:
        self.known.add(item)
        self.learn(item)

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        assert self.known.remove(key) == (self.model.pop(key, None) is not None)

    @rule(items=st.lists(ITEMS, max_size=MOST, unique_by=lambda item: item.key), meanwhile=st.none() | ITEMS)
    def relist(self, items: list[Listed], meanwhile: Listed | None) -> None:
        epoch = self.known.begin_listing()
        assert self.known.listed(items, epoch)
        seen = list(items)
        if meanwhile is not None:
            self.known.add(meanwhile)
            seen.append(meanwhile)
        for item in seen:
            self.learn(item)
        assert self.known.end_listing(epoch)
        there = {item.key for item in seen}
        self.model = {key: item for key, item in self.model.items() if key in there}

    @rule(items=st.lists(ITEMS, max_size=3))
    def clear_during_a_listing(self, items: list[Listed]) -> None:
        epoch = self.known.begin_listing()
        self.known.clear()
        self.model.clear()
        assert not self.known.listed(items, epoch)
        assert not self.known.end_listing(epoch)

    @rule(nbytes=st.integers(0, 2**41))
    def ask_for_the_oldest(self, nbytes: int) -> None:
        chosen = self.known.oldest(nbytes)
        ages = [self.model[key].written for key in chosen]
        assert ages == sorted(item.written for item in self.model.values())[: len(chosen)]
        sizes = [file_bytes(key, self.model[key].nbytes) for key in chosen]
        assert sum(sizes) >= nbytes or len(chosen) == len(self.model)
        assert not sizes or sum(sizes[:-1]) < nbytes

    @invariant()
    def same_as_the_model(self) -> None:
        keys = [*self.model, b"absent"]
        assert self.known.sizes(keys) == [*(item.nbytes for item in self.model.values()), 0]
        assert set(self.known.keys()) == set(self.model)
        assert self.known.value_bytes == sum(item.nbytes for item in self.model.values())
        assert self.known.stored_bytes == sum(file_bytes(item.key, item.nbytes) for item in self.model.values())


TestKnown = KnownMachine.TestCase
TestKnown.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
