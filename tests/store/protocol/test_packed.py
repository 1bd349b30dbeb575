"""Many keys in one argument come out as they went in; anything else is refused with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.store.protocol.limits import MAX_KEY_BYTES
from kvhearth.store.protocol.packed import (
    MAGIC,
    MAX_PACKED_BYTES,
    MAX_PACKED_KEYS,
    PackedKeysError,
    pack_keys,
    unpack_keys,
)

alike = st.integers(1, MAX_KEY_BYTES).flatmap(
    lambda length: st.lists(st.binary(min_size=length, max_size=length), min_size=1, max_size=40)
)


@settings(max_examples=50)
@given(alike)
def test_keys_of_one_length_come_out_as_they_went_in(keys: list[bytes]) -> None:
    packed = pack_keys(keys)
    assert packed is not None
    assert packed.startswith(MAGIC)
    assert len(packed) == 6 + sum(map(len, keys))
    assert unpack_keys(packed) == keys


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=4), max_size=6))
def test_any_keys_are_packed_rightly_or_not_at_all(keys: list[bytes]) -> None:
    packed = pack_keys(keys)
    if packed is None:
        assert not keys or len({*map(len, keys)}) > 1 or not keys[0]
    else:
        assert unpack_keys(packed) == keys


@settings(max_examples=50)
@given(st.one_of(st.binary(max_size=64), st.binary(max_size=64).map(MAGIC.__add__)))
def test_whatever_comes_is_either_packed_keys_or_refused(data: bytes) -> None:
    try:
        keys = unpack_keys(data)
    except PackedKeysError:
        return
    assert pack_keys(keys) == data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "packed keys of 0 bytes"),
        (MAGIC + b"\x01", "packed keys of 5 bytes"),
        (b"PLAIN key", "packed keys with a key length"),
        (MAGIC + b"\x00\x00", "key length of 0, want 1 to 512"),
        (MAGIC + (513).to_bytes(2, "little") + bytes(513), "key length of 513"),
        (MAGIC + b"\x04\x00", "in 0 bytes"),
        (MAGIC + b"\x04\x00" + b"abc", "of 4 bytes in 3 bytes"),
        (MAGIC + b"\x04\x00" + b"abcde", "of 4 bytes in 5 bytes"),
        (MAGIC + b"\x01\x00" + bytes(MAX_PACKED_KEYS + 1), "want 1 to 16384 whole keys"),
    ],
)
def test_what_is_not_packed_keys_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(PackedKeysError, match=reason):
        unpack_keys(data)


def test_more_than_the_bounds_is_not_packed() -> None:
    assert pack_keys([b"k"] * MAX_PACKED_KEYS) is not None
    assert pack_keys([b"k"] * (MAX_PACKED_KEYS + 1)) is None
    most = (MAX_PACKED_BYTES - 6) // MAX_KEY_BYTES
    assert pack_keys([bytes(MAX_KEY_BYTES)] * most) is not None
    assert pack_keys([bytes(MAX_KEY_BYTES)] * (most + 1)) is None
    assert pack_keys([bytes(MAX_KEY_BYTES + 1)]) is None
