"""The binary side of sharing memory: grants of pieces of the pool, and the numbers and sizes sent in requests, all
little-endian. A codec only.

A grant is its number (4 bytes) and how many pieces there are (4 bytes), then each piece's offset and length (8 bytes
each). Number 0 is a refusal, with its `Refusal` in place of the count.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

MAX_PIECES = 256
"""A value in more pieces than this travels over the connection."""
MAX_NUMBERS = 4096

_HEAD = struct.Struct("<II")
_PIECE = struct.Struct("<QQ")


class GrantFormatError(ValueError):
    """Bytes that are not what they should be; the message says why."""


class Refusal(IntEnum):
    """Why memory is not granted."""

    ABSENT = 0
    BUSY = 1
    """The connection, or all together, hold as much as they may, or the value is in too many pieces: it can still
    travel over the connection."""
    NO_ROOM = 2
    """Everything else is being sent or pinned."""
    TOO_LARGE = 3
    """The store does not keep values of this length."""
    BAD_KEY = 4


class Grant(NamedTuple):
    """Memory granted: ``number`` names it, ``pieces`` are (offset, length) in the pool, in order. Or a refusal."""

    number: int
    pieces: Sequence[tuple[int, int]] = ()
    refusal: Refusal | None = None

    @property
    def nbytes(self) -> int:
        """Length of all pieces."""
        return sum(length for _, length in self.pieces)


def refuse(why: Refusal) -> Grant:
    """A grant of nothing."""
    return Grant(0, (), why)


def pack_grants(grants: Iterable[Grant]) -> bytes:
    """``grants`` as they travel."""
    parts = []
    for grant in grants:
        parts.append(_HEAD.pack(grant.number, len(grant.pieces) if grant.refusal is None else grant.refusal))
        parts += [_PIECE.pack(*piece) for piece in grant.pieces]
    return b"".join(parts)


def unpack_grants(packed: bytes, count: int, pool_bytes: int) -> list[Grant]:
    """``count`` grants within a pool of ``pool_bytes``.

    Raises:
        GrantFormatError: they are not that.
    """
    grants: list[Grant] = []
    at = 0
    try:
        for _ in range(count):
            number, more = _HEAD.unpack_from(packed, at)
            at += _HEAD.size
            if not number:
                grants.append(refuse(Refusal(more)))
                continue
            end = at + more * _PIECE.size
            if more > MAX_PIECES or end > len(packed):
                raise GrantFormatError(f"a grant of {more} pieces")
            pieces = list(_PIECE.iter_unpack(packed[at:end]))
            if any(offset + length > pool_bytes for offset, length in pieces):
                raise GrantFormatError(f"a piece beyond the {pool_bytes} bytes that are shared")
            grants.append(Grant(number, pieces))
            at = end
    except (struct.error, ValueError) as error:
        raise GrantFormatError(str(error)) from None
    if at != len(packed):
        raise GrantFormatError(f"{len(packed) - at} bytes behind the last grant")
    return grants


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Numbers of grants, 4 bytes each."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_numbers(packed: bytes) -> tuple[int, ...]:
    """What `pack_numbers` packed.

    Raises:
        GrantFormatError: not whole numbers, or too many.
    """
    return _unpack(packed, "I", 4, "number")


def pack_sizes(sizes: Sequence[int]) -> bytes:
    """Lengths of values, 8 bytes each."""
    return struct.pack(f"<{len(sizes)}Q", *sizes)


def unpack_sizes(packed: bytes) -> tuple[int, ...]:
    """What `pack_sizes` packed.

    Raises:
        GrantFormatError: not whole numbers, or too many.
    """
    return _unpack(packed, "Q", 8, "size")


def _unpack(packed: bytes, code: str, width: int, noun: str) -> tuple[int, ...]:
    count, left = divmod(len(packed), width)
    if left or not 0 < count <= MAX_NUMBERS:
        raise GrantFormatError(f"{len(packed)} bytes are not 1 to {MAX_NUMBERS} {noun}s of {width} bytes")
    return struct.unpack(f"<{count}{code}", packed)
