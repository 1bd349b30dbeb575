"""Rows on the client's end of a connection: SETs of a header and a row, and GETs read into the caller's buffer and
verified. No connections, no retries.
"""

from __future__ import annotations

from kvhearth.store.header import HEADER_BYTES, ForeignVersionError, HeaderError, unpack_header
from kvhearth.store.outcomes import GetResult, Miss, MissReason, PutResult
from kvhearth.store.wire import WireConnection

_UNWELL = ("NOAUTH", "WRONGPASS", "NOPERM", "LOADING", "MASTERDOWN", "ERR max number of clients", "ERR Protocol error")


def is_unwell(miss: Miss) -> bool:
    """Whether a refusal says that the store serves nobody now, rather than that it will not do this one thing."""
    return miss.detail.startswith(_UNWELL)


def set_pieces(key: bytes, header: bytes, row: memoryview) -> list[bytes | memoryview]:
    """A SET of a packed header and a row, which is not copied."""
    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (len(key), key, len(header) + len(row), header)
    return [head, row, b"\r\n"]


def read_stored(wire: WireConnection, deadline: float) -> PutResult:
    """The answer to a SET.

    Raises:
        Miss: the call cannot go on.
    """
    try:
        wire.status(deadline)
    except Miss as miss:
        if miss.reason not in (MissReason.REFUSED, MissReason.TOO_LARGE) or is_unwell(miss):
            raise
        return PutResult(miss.reason)
    return PutResult(None)


def read_row(wire: WireConnection, key: bytes, buffer: memoryview, deadline: float) -> GetResult:
    """The answer to a GET, its row at the start of ``buffer``.

    Raises:
        Miss: the call cannot go on.
    """
    try:
        length = wire.bulk_length(deadline)
    except Miss as miss:
        if miss.reason is not MissReason.REFUSED or is_unwell(miss):
            raise
        return GetResult(miss.reason)  # an error in place of this value; the rest of the pipeline stands
    if length is None:
        return GetResult(MissReason.ABSENT)
    nbytes = length - HEADER_BYTES
    if not 0 <= nbytes <= len(buffer):
        wire.skip(length, deadline)
        wire.crlf(deadline)
        return GetResult(MissReason.HEADER if nbytes < 0 else MissReason.TOO_LARGE)
    raw = bytearray(HEADER_BYTES)
    wire.read_into([memoryview(raw), buffer[:nbytes]], deadline)
    wire.crlf(deadline)
    return _verified(raw, key, buffer[:nbytes])


def _verified(raw: bytearray, key: bytes, row: memoryview) -> GetResult:
    try:
        header = unpack_header(raw)
    except ForeignVersionError:
        return GetResult(MissReason.HEADER)
    except HeaderError:
        return GetResult(MissReason.CHECKSUM)
    if header.payload_bytes != len(row) or not header.matches(key, row):
        return GetResult(MissReason.CHECKSUM)
    return GetResult(None, header, len(row))
