"""Which nodes hold a key: the same everywhere, evenly, on different nodes, and with few moves when nodes change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.store.ring.placement import Ring

NAMES = st.lists(st.integers(1, 60_000).map("n:{}".format), min_size=1, max_size=12, unique=True)
KEYS = [b"%032x:%08d" % (number * 7919, number) for number in range(4000)]
MASK = 2**64 - 1


def preference(nodes: list[str], key: bytes) -> list[str]:
    """The rule again, a node and a key at a time."""

    def weight(node: str) -> int:
        value = xxhash.xxh3_64_intdigest(key) ^ xxhash.xxh3_64_intdigest(node.encode())
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
        return value ^ (value >> 31)

    return sorted(nodes, key=weight, reverse=True)


@settings(max_examples=40)
@given(names=NAMES, keys=st.lists(st.binary(min_size=1, max_size=80), max_size=20), copies=st.integers(1, 3))
def test_owners_are_the_most_preferred_nodes_whatever_order_they_are_given_in(
    names: list[str], keys: list[bytes], copies: int
) -> None:
    ring, same = Ring(names), Ring(reversed(names))
    for key in keys:
        assert list(ring.owners(key, copies)) == preference(names, key)[:copies]
        assert ring.owners(key, copies) == same.owners(key, copies)
    assert (ring.place(keys, copies) == same.place(keys, copies)).all()


@settings(max_examples=40)
@given(names=NAMES, key=st.binary(min_size=1, max_size=80))
def test_copies_are_on_different_nodes(names: list[str], key: bytes) -> None:
    owners = Ring(names).owners(key, 2)
    assert len(set(owners)) == len(owners) == min(2, len(names))


@settings(max_examples=40)
@given(names=NAMES, extra=st.integers(1, 99).map("new:{}".format))
def test_only_keys_of_the_node_that_comes_or_goes_move(names: list[str], extra: str) -> None:
    small, large = Ring(names), Ring([*names, extra])
    for key in KEYS[:30]:
        before, after = small.owners(key, 2), large.owners(key, 2)
        assert after == before or (extra in after and [node for node in after if node != extra] == list(before)[:1])


@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
def test_a_node_more_takes_its_share_and_no_other_key_moves(count: int) -> None:
    names = [f"10.0.0.{number}:7420" for number in range(count)]
    small, large = Ring(names), Ring([*names, "10.0.1.1:7420"])
    before = [small.nodes[at] for at in small.place(KEYS, 1)[:, 0]]
    after = [large.nodes[at] for at in large.place(KEYS, 1)[:, 0]]
    moved = [now for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) <= {"10.0.1.1:7420"}
    share = len(KEYS) / (count + 1)
    assert abs(len(moved) - share) < 6 * share**0.5


def test_keys_are_spread_evenly() -> None:
    ring = Ring(f"10.0.0.{number}:7420" for number in range(8))
    for column in range(2):
        counts = Counter(ring.place(KEYS, 2)[:, column].tolist())
        assert set(counts) == set(range(8))
        assert all(abs(number - 500) < 6 * 500**0.5 for number in counts.values())


@settings(max_examples=40)
@given(names=NAMES, data=st.data())
def test_a_node_that_is_passed_over_leaves_its_keys_to_the_next_in_their_order(
    names: list[str], data: st.DataObject
) -> None:
    ring = Ring(names)
    up = data.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    alive = [name for name, there in zip(ring.nodes, up, strict=True) if there] or list(ring.nodes)
    places = ring.place(KEYS[:50], 2, up)
    for key, row in zip(KEYS[:50], places.tolist(), strict=True):
        assert [ring.nodes[index] for index in row] == preference(alive, key)[:2]


def test_another_process_with_another_hash_seed_finds_the_same_owners() -> None:
    names = [f"node-{number}:7420" for number in range(5)]
    script = f"from kvhearth.store.ring.placement import Ring; print(Ring({names!r}).place({KEYS[:40]!r}, 2).tolist())"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True, timeout=60)
    assert out.stdout.decode().strip() == str(Ring(names).place(KEYS[:40], 2).tolist())


def test_owners_never_change_between_versions() -> None:
    ring = Ring(["a:7420", "b:7420", "c:7420"])
    owners = [ring.owners(b"%d" % number, 2) for number in range(4)]
    assert owners == [("a:7420", "c:7420"), ("b:7420", "c:7420"), ("a:7420", "b:7420"), ("a:7420", "b:7420")]


def test_no_nodes_and_no_keys() -> None:
    assert Ring(()).owners(b"k", 2) == ()
    assert Ring(()).place([b"k"], 1).shape == (1, 0)
    assert Ring(["a:1", "b:1"]).place([], 2).shape == (0, 2)
