"""The 64-byte header in front of every row kept in the store. The server treats header and row as one opaque value, but
for what it weighs and counts the value by: place in its chain, recompute cost, sharing group.

The checksum covers the key, the header and the row, so a flipped bit, a truncated row, and another key's bytes are all
found by whoever reads them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"KVHV"
VERSION = 1
HEADER_BYTES = 64

_FIELDS = struct.Struct("<4sHHQIIQQQ")
_CHECKSUM_BYTES = 16
_START = struct.pack("<4sH", MAGIC, VERSION)


class HeaderError(ValueError):
    """These 64 bytes are not a header that this version reads."""


class ForeignVersionError(HeaderError):
    """A well-formed header of another version: not ours to judge, nor to delete."""


class Header(NamedTuple):
    """What travels with a row. Whoever puts one sets the first five fields; `sealed` fills in the rest.

    Attributes:
        position: place of the chunk in its chain, from 0.
        parent: xxh3-64 of the key of the chunk before it in the chain; 0 at position 0.
        recompute_ns: what computing this chunk again would cost, for eviction and admission.
        group: sharing group: a digest of what keeps its chunks apart from others' (vLLM's ``cache_salt``); 0 for none.
        epoch: weights epoch under which the row was computed.
        payload_bytes: length of the row.
        checksum: `checksum_of` key, header and row (16 bytes).
    """

    position: int = 0
    parent: int = 0
    recompute_ns: int = 0
    group: int = 0
    epoch: int = 0
    payload_bytes: int = 0
    checksum: bytes = b"\0" * _CHECKSUM_BYTES

    def pack(self) -> bytes:
        """The 64 bytes, little-endian.

        Raises:
            HeaderError: a field does not fit (position and group: 32 bits; the others: 64 bits, all non-negative).
        """
        if len(self.checksum) != _CHECKSUM_BYTES:
            raise HeaderError(f"checksum has {len(self.checksum)} bytes, want {_CHECKSUM_BYTES}")
        return self._pack_fields() + self.checksum

    def sealed(self, key: bytes, row: Buffer) -> Header:
        """This header with the length of ``row`` and the checksum over ``key``, itself and ``row``.

        Raises:
            HeaderError: a field does not fit.
        """
        sized = self._replace(payload_bytes=memoryview(row).nbytes)
        return sized._replace(checksum=checksum_of(key, sized._pack_fields(), row))

    def matches(self, key: bytes, row: Buffer) -> bool:
        """Whether ``row`` is the row that was sealed under ``key`` with this header."""
        return checksum_of(key, self._pack_fields(), row) == self.checksum

    def _pack_fields(self) -> bytes:
        try:
            return _FIELDS.pack(
                MAGIC,
                VERSION,
                0,
                self.payload_bytes,
                self.position,
                self.group,
                self.parent,
                self.recompute_ns,
                self.epoch,
            )
        except struct.error as error:
            raise HeaderError(f"field out of range in {self}: {error}") from None


def checksum_of(key: bytes, fields: bytes, row: Buffer) -> bytes:
    """xxh3-128 of the row, seeded with the xxh3-64 of header fields and key (16 bytes)."""
    return xxhash.xxh3_128_digest(row, seed=xxhash.xxh3_64_intdigest(fields + key))


def peek_header(value: Buffer) -> Header | None:
    """The header of the value that starts with these bytes, its checksum left out; None for what is no row of this
    version."""
    head = memoryview(value)[: _FIELDS.size]
    if len(head) < _FIELDS.size or head[: len(_START)] != _START:
        return None
    _, _, _, payload_bytes, position, group, parent, recompute_ns, epoch = _FIELDS.unpack(head)
    return Header(position, parent, recompute_ns, group, epoch, payload_bytes)


def unpack_header(raw: Buffer) -> Header:
    """Read a header from its 64 bytes.

    Raises:
        HeaderError: wrong length, wrong magic, or reserved bits set.
        ForeignVersionError: a version other than ours.
    """
    data = bytes(raw)
    if len(data) != HEADER_BYTES:
        raise HeaderError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
    magic, version, reserved, payload_bytes, position, group, parent, recompute_ns, epoch = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise HeaderError(f"header starts with {magic!r}, want {MAGIC!r}")
    if version != VERSION:
        raise ForeignVersionError(f"header version {version}, this build reads {VERSION}")
    if reserved:
        raise HeaderError(f"reserved header bits are set: {reserved:#06x}")
    return Header(position, parent, recompute_ns, group, epoch, payload_bytes, data[_FIELDS.size :])
