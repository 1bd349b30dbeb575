"""The value header: 64 bytes that say what a row is, and prove that it is that row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.protocol.header import (
    HEADER_BYTES,
    MAGIC,
    ForeignVersionError,
    Header,
    HeaderError,
    peek_header,
    unpack_header,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
headers = st.builds(Header, position=u32, parent=u64, recompute_ns=u64, group=u32, epoch=u64)


@given(headers, st.binary(min_size=1, max_size=40), st.binary(max_size=300))
def test_what_is_packed_is_what_is_read(header: Header, key: bytes, row: bytes) -> None:
    sealed = header.sealed(key, row)
    raw = sealed.pack()
    assert len(raw) == HEADER_BYTES
    assert unpack_header(raw) == sealed
    assert sealed.payload_bytes == len(row)
    assert sealed.matches(key, row)
    assert sealed[:5] == header[:5]


@given(headers, st.binary(min_size=1, max_size=100), st.data())
def test_any_flipped_bit_of_header_or_row_is_noticed(header: Header, row: bytes, data: st.DataObject) -> None:
    value = bytearray(header.sealed(b"key", row).pack() + row)
    bit = data.draw(st.integers(0, len(value) * 8 - 1))
    value[bit // 8] ^= 1 << bit % 8
    try:
        read = unpack_header(value[:HEADER_BYTES])
    except HeaderError:
        return
    assert not read.matches(b"key", value[HEADER_BYTES:])


def test_another_keys_row_is_noticed() -> None:
    row = b"same bytes" * 10
    assert not Header().sealed(b"key-a", row).matches(b"key-b", row)


def test_a_truncated_row_is_noticed() -> None:
    row = bytes(100)
    assert not Header().sealed(b"key", row).matches(b"key", row[:99])


def test_the_layout_is_fixed() -> None:
    # Values outlive processes: a change here needs a new VERSION.
    raw = Header(1, 2, 3, 4, 5).sealed(b"key", b"row").pack()
    fields = "4b564856010000000300000000000000010000000400000002000000000000000300000000000000"
    assert raw[:48].hex() == fields + "0500000000000000"
    assert raw[48:].hex() == "def020df96ee79797548cc18caaca678"


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "has 64 bytes, got 0"),
        (bytes(63), "has 64 bytes, got 63"),
        (b"nope" + bytes(60), "starts with b'nope'"),
        (MAGIC + b"\x01\x00\x01\x00" + bytes(56), "reserved"),
    ],
)
def test_what_is_no_header_says_why(raw: bytes, complaint: str) -> None:
    with pytest.raises(HeaderError, match=complaint):
        unpack_header(raw)


@given(headers)
def test_the_server_reads_the_header_of_a_value_that_is_a_row_and_none_elsewhere(header: Header) -> None:
    value = header.sealed(b"key", b"row").pack() + b"row"
    assert peek_header(value) == header._replace(payload_bytes=3, checksum=bytes(16))
    assert peek_header(value[: HEADER_BYTES - 17]) is None
    assert peek_header(b"X" + value[1:]) is None
    assert peek_header(b"") is None


def test_another_version_is_told_apart_from_rubbish() -> None:
    with pytest.raises(ForeignVersionError, match="version 2"):
        unpack_header(MAGIC + b"\x02\x00" + bytes(58))


@pytest.mark.parametrize("field", ["position", "parent", "recompute_ns", "group", "epoch"])
@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_field_that_does_not_fit_is_refused(field: str, number: int) -> None:
    with pytest.raises(HeaderError, match=field):
        Header(**{field: number}).sealed(b"key", b"")
