"""A file is the value that was written under its key, or it is found out: every flipped bit, cut and mix-up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.tiers.files import HEAD_BYTES, FileError, Flaw, file_bytes, pack_start, parse_file, parse_head

KEYS = st.binary(min_size=1, max_size=512)
PIECES = st.lists(st.binary(max_size=300), max_size=5)


def written(key: bytes, pieces: list[bytes]) -> bytes:
    return pack_start(key, [memoryview(piece) for piece in pieces]) + b"".join(pieces)


def read(raw: bytes, key: bytes) -> bytes:
    return bytes(parse_file(memoryview(raw), key))


def flaw_of(raw: bytes, key: bytes) -> Flaw:
    with pytest.raises(FileError) as caught:
        read(raw, key)
    return caught.value.flaw


@given(KEYS, PIECES)
def test_what_was_written_comes_back_however_it_was_cut_into_pieces(key: bytes, pieces: list[bytes]) -> None:
    raw = written(key, pieces)
    assert read(raw, key) == b"".join(pieces)
    assert len(raw) == file_bytes(key, sum(map(len, pieces)))


@given(KEYS, st.binary(max_size=64), st.data())
def test_a_flipped_bit_anywhere_is_a_miss(key: bytes, value: bytes, data: st.DataObject) -> None:
    raw = bytearray(written(key, [value]))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    flaw_of(bytes(raw), key)


def test_every_bit_of_a_small_file_counts() -> None:
    key, raw = b"a key", written(b"a key", [b"a value of some bytes"])
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        flaw_of(bytes(damaged), key)


@given(KEYS, st.binary(max_size=64), st.data())
def test_a_truncated_file_is_a_miss(key: bytes, value: bytes, data: st.DataObject) -> None:
    raw = written(key, [value])
    assert flaw_of(raw[: data.draw(st.integers(0, len(raw) - 1))], key) is Flaw.TRUNCATED


@given(KEYS, st.binary(max_size=64), st.binary(min_size=1, max_size=8))
def test_a_file_with_something_behind_it_is_a_miss(key: bytes, value: bytes, more: bytes) -> None:
    assert flaw_of(written(key, [value]) + more, key) is Flaw.TRUNCATED


@given(KEYS, KEYS, st.binary(max_size=64))
def test_another_keys_bytes_are_a_miss(key: bytes, other: bytes, value: bytes) -> None:
    if key != other:
        assert flaw_of(written(other, [value]), key) in (Flaw.OTHER_KEY, Flaw.TRUNCATED)


def test_another_version_is_told_from_damage() -> None:
    raw = bytearray(written(b"k", [b"value"]))
    raw[4] += 1
    assert flaw_of(bytes(raw), b"k") is Flaw.VERSION
    assert not Flaw.VERSION.is_ours
    assert Flaw.CHECKSUM.is_ours


@given(st.binary(max_size=2 * HEAD_BYTES))
def test_noise_is_never_taken_for_a_head_without_its_magic(noise: bytes) -> None:
    if noise[:4] != b"KVHF":
        with pytest.raises(FileError):
            parse_head(noise)
