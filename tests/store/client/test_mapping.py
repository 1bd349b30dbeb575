"""Copies between the store's memory and a client's buffers."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.client.mapping import Mapping, MappingError

NBYTES = 64 * 1024


def memory(nbytes: int, *, sealed: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


@pytest.fixture
def fd() -> Iterator[int]:
    made = memory(NBYTES)
    yield made
    os.close(made)


def cut(total: int, cuts: list[int]) -> list[int]:
    """Lengths of the parts of ``total`` when cut at ``cuts``; some may be 0."""
    edges = [0, *sorted(place % (total + 1) for place in cuts), total]
    return [end - start for start, end in itertools.pairwise(edges)]


@given(st.integers(1, 20_000), st.lists(st.integers(0, 20_000), max_size=6), st.lists(st.integers(0), max_size=6))
def test_bytes_come_back_in_order_however_both_sides_are_cut(
    total: int, piece_cuts: list[int], view_cuts: list[int]
) -> None:
    fd = memory(NBYTES)
    try:
        mapping = Mapping(fd, NBYTES)
        lengths = [length for length in cut(total, piece_cuts) if length]
        places = random.Random(total)
        pieces, at = [], 0
        for length in lengths:
            at += places.randrange(4000)
            pieces.append((at, length))
            at += length
        places.shuffle(pieces)
        row = places.randbytes(total)
        view = memoryview(row)
        starts = [0, *sorted(place % (total + 1) for place in view_cuts), total]
        mapping.copy_in([view[a:b] for a, b in itertools.pairwise(starts)], pieces)
        assert b"".join(os.pread(fd, length, offset) for offset, length in pieces) == row
        back = memoryview(bytearray(total))
        mapping.copy_out(pieces, [back[a:b] for a, b in itertools.pairwise(starts)])
        assert back == row
    finally:
        os.close(fd)


def test_a_copy_ends_where_the_buffers_end(fd: int) -> None:
    mapping = Mapping(fd, NBYTES)
    mapping.copy_in([memoryview(b"abcdef")], [(100, 6)])
    first = bytearray(2)
    mapping.copy_out([(100, 6)], [memoryview(first)])
    assert first == b"ab"


def test_the_whole_mapping_can_be_faulted_in_or_stopped(fd: int) -> None:
    mapping = Mapping(fd, NBYTES)
    mapping.fault_in(lambda: True)
    mapping.fault_in(lambda: False)
    mapping.copy_in([memoryview(b"x" * NBYTES)], [(0, NBYTES)])
    assert os.pread(fd, NBYTES, 0) == b"x" * NBYTES


def test_memory_that_could_be_pulled_away_is_not_mapped() -> None:
    fd = memory(NBYTES, sealed=False)
    try:
        with pytest.raises(MappingError, match="seals 0x0"):
            Mapping(fd, NBYTES)
    finally:
        os.close(fd)


def test_memory_of_another_length_than_told_is_not_mapped(fd: int) -> None:
    for told in (NBYTES + 1, NBYTES - 1, 0):
        with pytest.raises(MappingError, match=f"memory of {NBYTES} bytes"):
            Mapping(fd, told)


def test_what_is_no_memory_is_not_mapped() -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(MappingError):
            Mapping(read, NBYTES)
    finally:
        os.close(read)
        os.close(write)
