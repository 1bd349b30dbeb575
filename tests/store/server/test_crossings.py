"""While a key changes nothing of it goes up or down, and what was on its way before is known to be old."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.store.server.crossings import Crossings


def test_a_key_that_is_being_changed_is_neither_lifted_nor_saved() -> None:
    crossings = Crossings()
    with crossings.changing([b"a", b"b", b"a"]):
        assert crossings.version(b"a") is None
        assert not crossings.begin_save(b"b", 1)
        assert crossings.version(b"c") is not None
        assert crossings.begin_save(b"c", 1)
    assert crossings.version(b"a") is not None
    assert crossings.begin_save(b"b", 1)


def test_of_two_changes_at_once_the_last_to_end_counts() -> None:
    crossings = Crossings()
    with crossings.changing([b"a"]):
        with crossings.changing([b"a"]):
            pass
        assert crossings.version(b"a") is None
    assert crossings.version(b"a") is not None


def test_a_change_that_fails_ends_too() -> None:
    crossings = Crossings()
    with pytest.raises(RuntimeError), crossings.changing([b"a"]):
        raise RuntimeError
    with pytest.raises(RuntimeError), crossings.clearing():
        raise RuntimeError
    assert crossings.version(b"a") is not None


def test_a_lift_of_before_a_change_is_void() -> None:
    crossings = Crossings()
    version = crossings.version(b"a")
    assert version is not None
    assert crossings.is_current(b"a", version)
    with crossings.changing([b"a"]):
        assert not crossings.is_current(b"a", version)
    assert not crossings.is_current(b"a", version)


def test_while_all_is_cleared_nothing_is_lifted_or_saved_and_what_was_lifted_before_is_void() -> None:
    crossings = Crossings()
    version = crossings.version(b"a")
    assert version is not None
    with crossings.clearing():
        assert crossings.version(b"b") is None
        assert not crossings.begin_save(b"b", 1)
    assert not crossings.is_current(b"a", version)
    assert crossings.version(b"a") is not None


def test_one_save_of_a_key_at_once_in_each_tier() -> None:
    crossings = Crossings()
    assert crossings.begin_save(b"a", 1)
    assert not crossings.begin_save(b"a", 1)
    assert crossings.begin_save(b"a", 2)
    crossings.end_save(b"a", 1)
    assert not crossings.is_saving(b"a", 1)
    assert crossings.is_saving(b"a", 2)


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=4), max_size=8))
def test_nothing_is_remembered_of_what_is_over(changes: list[list[bytes]]) -> None:
    crossings = Crossings()
    for keys in changes:
        with crossings.changing(keys):
            pass
    assert not crossings._changing
    assert not crossings._saving
