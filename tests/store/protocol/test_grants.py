"""Grants of pieces of the pool, numbers and sizes, as they travel."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.protocol.grants import (
    MAX_NUMBERS,
    MAX_PIECES,
    Grant,
    GrantFormatError,
    Refusal,
    pack_grants,
    pack_numbers,
    pack_sizes,
    refuse,
    unpack_grants,
    unpack_numbers,
    unpack_sizes,
)

POOL_BYTES = 2**40
pieces = st.lists(st.tuples(st.integers(0, 2**39), st.integers(1, 2**39)), max_size=20)
grants = st.one_of(st.sampled_from(Refusal).map(refuse), st.builds(Grant, st.integers(1, 2**32 - 1), pieces, st.none()))


@given(st.lists(grants, max_size=20))
def test_what_is_granted_and_what_is_refused_arrive_as_they_left(given_grants: list[Grant]) -> None:
    assert unpack_grants(pack_grants(given_grants), len(given_grants), POOL_BYTES) == given_grants


@given(st.binary(max_size=200), st.integers(0, 10), st.integers(0, 2**33))
def test_any_bytes_are_grants_within_the_pool_or_refused(raw: bytes, count: int, pool_bytes: int) -> None:
    with contextlib.suppress(GrantFormatError):
        found = unpack_grants(raw, count, pool_bytes)
        assert len(found) == count
        assert pack_grants(found) == raw
        assert all(offset + length <= pool_bytes for grant in found for offset, length in grant.pieces)


@pytest.mark.parametrize("grant", [Grant(1, [(0, 101)]), Grant(1, [(100, 1)]), Grant(1, [(0, 1)] * (MAX_PIECES + 1))])
def test_a_piece_beyond_the_pool_or_too_many_are_refused(grant: Grant) -> None:
    with pytest.raises(GrantFormatError):
        unpack_grants(pack_grants([grant]), 1, 100)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100))
def test_numbers_arrive_as_they_left(numbers: list[int]) -> None:
    assert list(unpack_numbers(pack_numbers(numbers))) == numbers


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=100))
def test_sizes_arrive_as_they_left(sizes: list[int]) -> None:
    assert list(unpack_sizes(pack_sizes(sizes))) == sizes


@pytest.mark.parametrize("raw", [b"", b"123", bytes(5), bytes(4 * MAX_NUMBERS + 4)])
def test_no_whole_numbers_none_or_too_many_are_refused(raw: bytes) -> None:
    with pytest.raises(GrantFormatError, match=f"{len(raw)} bytes are not 1 to"):
        unpack_numbers(raw)
