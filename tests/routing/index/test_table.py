"""The table is a dict in order of insertion, but for its size."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.routing.index.table import HashTable

# Few hashes that share their low bits, so that probes collide, wrap round and meet holes.
hashes = st.one_of(st.integers(0, 30), st.integers(0, 3).map(lambda n: n << 40 | 15), st.integers(2**64 - 3, 2**64 - 1))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), hashes, st.integers(1, 2**64 - 1)),
        st.tuples(st.just("pop"), hashes),
        st.tuples(st.just("pop_oldest")),
        st.tuples(st.just("clear")),
    ),
    max_size=300,
)


def apply(model: dict[int, int], step: tuple) -> object:
    match step:
        case ("add", hash_, key):
            known = model.get(hash_, 0)
            model.setdefault(hash_, key)
            return known
        case ("pop", hash_):
            return model.pop(hash_, 0)
        case ("pop_oldest",):
            return (oldest := next(iter(model)), model.pop(oldest)) if model else None
    return model.clear()


@given(steps=steps)
@settings(max_examples=150)
def test_it_does_what_a_dict_does(steps):
    table, model = HashTable(), {}
    for step in steps:
        expected = apply(model, step)
        if step[0] == "pop_oldest" and expected is None:
            with pytest.raises(KeyError):
                table.pop_oldest()
        else:
            assert getattr(table, step[0])(*step[1:]) == expected
        assert len(table) == len(model)
        assert list(table.items()) == list(model.items())
    assert {hash_: table.get(hash_) for hash_ in range(31)} == {hash_: model.get(hash_, 0) for hash_ in range(31)}


def test_it_stays_a_dict_and_small_as_it_grows_turns_over_and_shrinks():
    random_hashes = random.Random(7)
    table, model = HashTable(), {}
    for size in (20_000, 20_000, 50):
        while len(model) < size:
            hash_ = random_hashes.getrandbits(64)
            table.add(hash_, 1 + hash_ // 2)
            model[hash_] = 1 + hash_ // 2
        for hash_ in random_hashes.sample(sorted(model), len(model) * 3 // 5):
            assert table.pop(hash_) == model.pop(hash_)
        assert list(table.items()) == list(model.items())
        assert all(table.get(hash_) == key for hash_, key in model.items())
        assert table.nbytes < 200 * len(table) + 1000
