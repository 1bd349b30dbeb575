"""What each namespace or group has: exact for as many as are told apart, and never more names than that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.dram import shares as module
from kvhearth.store.dram.shares import MAX_SHARES, OTHER, SHOWN, Share, Shares, namespace_of


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 1000), st.booleans()), max_size=300))
def test_names_are_bounded_and_sums_are_exact(steps: list[tuple[int, int, bool]]) -> None:
    shares = Shares()
    held: list[tuple[int, int, int]] = []
    for name, nbytes, drop_one in steps:
        if drop_one and held:
            number, size, _ = held.pop(nbytes % len(held))
            shares.remove(number, size)
        else:
            number = shares.number(name)
            shares.add(number, nbytes)
            held.append((number, nbytes, name))
    shown = shares.by_name()
    others = shown.pop(None, Share(0, 0))
    assert len(shown) <= SHOWN
    assert sum(share.value_bytes for share in shown.values()) + others.value_bytes == sum(n for _, n, _ in held)
    assert sum(share.values for share in shown.values()) + others.values == len(held)
    for name, share in shown.items():
        own = [nbytes for _, nbytes, held_name in held if held_name == name]
        assert share == (sum(own), len(own))


def test_beyond_the_bound_names_are_counted_together_until_a_place_is_free() -> None:
    shares = Shares(quota_bytes=100)
    numbers = [shares.number(name) for name in range(1, MAX_SHARES + 1)]
    for number in numbers:
        shares.add(number, 1)
    assert shares.number("late") == OTHER
    assert shares.quota(OTHER) == 100
    shares.remove(numbers[0], 1)
    assert shares.number("later") == numbers[0]


def test_the_usual_quota_is_for_names_and_an_own_one_for_anything() -> None:
    shares = Shares(100, {b"rich": 1000, 0: 50})
    assert shares.quota(shares.number(b"some")) == 100
    assert shares.quota(shares.number(b"rich")) == 1000
    assert shares.quota(shares.number(b"")) == 0
    assert shares.quota(shares.number(0)) == 50


def test_the_namespace_is_what_stands_before_the_first_colon() -> None:
    assert namespace_of(b"abc:rest:more") == b"abc"
    assert namespace_of(b"no colon") == b""
    assert namespace_of(b":rest") == b""
    assert namespace_of(b"x" * module.NAMESPACE_BYTES + b":k") == b"x" * module.NAMESPACE_BYTES
    assert namespace_of(b"x" * (module.NAMESPACE_BYTES + 1) + b":k") == b""
