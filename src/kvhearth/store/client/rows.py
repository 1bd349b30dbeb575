"""Rows on the client's end of a connection: SETs of a header and a row, and GETs read into the caller's buffer and
verified. No connections, no retries.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvhearth.store.client.outcomes import GetResult, Miss, MissReason, PutResult
from kvhearth.store.client.wire import WireConnection, encode_command
from kvhearth.store.protocol.header import HEADER_BYTES, ForeignVersionError, HeaderError, unpack_header

_WINDOW = 64
_UNWELL = ("NOAUTH", "WRONGPASS", "LOADING", "MASTERDOWN", "ERR max number of clients", "ERR Protocol error")


def is_unwell(miss: Miss) -> bool:
    """Whether a refusal says that the store serves nobody now, rather than that it will not do this one thing."""
    return miss.detail.startswith(_UNWELL)


def get_rows(
    wire: WireConnection,
    keys: Sequence[bytes],
    views: Sequence[memoryview],
    places: Sequence[int],
    results: list[GetResult | None],
    deadline: float,
) -> None:
    """GET those of ``keys`` that are at ``places``, in a pipeline, and fill in their results as they come.

    Raises:
        Miss: the call cannot go on.
    """
    for start in range(0, len(places), _WINDOW):
        window = places[start : start + _WINDOW]
        wire.send([b"".join([encode_command(b"GET", keys[place]) for place in window])], deadline)
        for place in window:
            results[place] = read_row(wire, keys[place], views[place], deadline)


def put_rows(
    wire: WireConnection,
    keys: Sequence[bytes],
    headers: Sequence[bytes],
    rows: Sequence[memoryview],
    places: Sequence[int],
    results: list[PutResult | None],
    deadline: float,
) -> None:
    """SET the rows at ``places``, in a pipeline, and fill in their results as they come.

    Raises:
        Miss: the call cannot go on.
    """
    for start in range(0, len(places), _WINDOW):
        window = places[start : start + _WINDOW]
        pieces: list[bytes | memoryview] = []
        for place in window:
            pieces += set_pieces(keys[place], headers[place], rows[place])
        wire.send(pieces, deadline)
        for place in window:
            results[place] = read_stored(wire, deadline)


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
    return verified(raw, key, buffer[:nbytes])


def verified(raw: bytearray, key: bytes, row: memoryview) -> GetResult:
    """Whether ``row`` is what was put under ``key``, by the header ``raw`` that came before it."""
    try:
        header = unpack_header(raw)
    except ForeignVersionError:
        return GetResult(MissReason.HEADER)
    except HeaderError:
        return GetResult(MissReason.CHECKSUM)
    if header.payload_bytes != len(row) or not header.matches(key, row):
        return GetResult(MissReason.CHECKSUM)
    return GetResult(None, header, len(row))
