"""How a value is written down below the DRAM, in a file or an object alike, and how it is known to be right. No I/O.

A file is 32 bytes of head, the key, and the value. The head holds magic, version, both lengths and a checksum over
head, key and value, so that a flipped bit, a file cut or grown, and another key's bytes are each found by the reader.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import xxhash

MAGIC = b"KVHF"
VERSION = 1
HEAD_BYTES = 32

_FIELDS = struct.Struct("<4sHHQ")


class Flaw(Enum):
    """What is wrong with a file. Each is a miss."""

    TRUNCATED = "truncated"
    """Shorter or longer than its head says."""
    CHECKSUM = "checksum"
    """The bytes are not those that were written, or no head of ours comes first."""
    OTHER_KEY = "other_key"
    """A whole file, but of another key."""
    VERSION = "version"
    """Written by another version: not ours to judge, nor to delete."""

    @property
    def is_ours(self) -> bool:
        """Whether the file is worth nothing to anybody, and may be deleted."""
        return self is not Flaw.VERSION


class FileError(ValueError):
    """This is not the file that was written under the key."""

    def __init__(self, flaw: Flaw) -> None:
        self.flaw = flaw
        super().__init__(flaw.value)


class Head(NamedTuple):
    """What the first ``HEAD_BYTES`` bytes say."""

    key_bytes: int
    value_bytes: int
    fields: bytes
    checksum: bytes


def file_bytes(key: bytes, value_bytes: int) -> int:
    """Length of the file of a value."""
    return HEAD_BYTES + len(key) + value_bytes


def pack_start(key: bytes, views: Iterable[memoryview]) -> bytes:
    """Head and key of the file whose value is ``views`` joined (contiguous pieces). One pass over the value."""
    pieces = list(views)
    fields = _FIELDS.pack(MAGIC, VERSION, len(key), sum(piece.nbytes for piece in pieces))
    check = Checker(fields, key)
    for piece in pieces:
        check.feed(piece)
    return fields + check.digest() + key


def parse_head(raw: bytes) -> Head:
    """Read a file's first ``HEAD_BYTES`` bytes.

    Raises:
        FileError: too short, not a file of ours, or of another version.
    """
    if len(raw) < HEAD_BYTES:
        raise FileError(Flaw.TRUNCATED)
    magic, version, key_bytes, value_bytes = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise FileError(Flaw.CHECKSUM)
    if version != VERSION:
        raise FileError(Flaw.VERSION)
    return Head(key_bytes, value_bytes, bytes(raw[: _FIELDS.size]), bytes(raw[_FIELDS.size : HEAD_BYTES]))


class Checker:
    """Computes the checksum of a file piece by piece: xxh3-128 of the value, seeded with the xxh3-64 of the head's
    fields and the key."""

    def __init__(self, fields: bytes, key: bytes) -> None:
        self._hash = xxhash.xxh3_128(seed=xxhash.xxh3_64_intdigest(fields + key))

    def feed(self, piece: memoryview) -> None:
        """The next bytes of the value."""
        self._hash.update(piece)

    def digest(self) -> bytes:
        """The 16 bytes."""
        return self._hash.digest()


def checked_start(raw: bytes, key: bytes, file_size: int) -> Head:
    """The head of a file, of which ``raw`` holds head and key at least, and which should be that of ``key``.

    Raises:
        FileError: it is not, as far as can be told without the value.
    """
    head = parse_head(raw)
    if HEAD_BYTES + head.key_bytes + head.value_bytes != file_size:
        raise FileError(Flaw.TRUNCATED)
    if head.key_bytes != len(key) or raw[HEAD_BYTES : HEAD_BYTES + head.key_bytes] != key:
        raise FileError(Flaw.OTHER_KEY)
    return head


def parse_file(whole: memoryview, key: bytes) -> memoryview:
    """The value in ``whole``, which should be the file of ``key``.

    Raises:
        FileError: it is not.
    """
    head = checked_start(bytes(whole[: HEAD_BYTES + len(key)]), key, len(whole))
    value = whole[HEAD_BYTES + head.key_bytes :]
    check = Checker(head.fields, key)
    check.feed(value)
    if check.digest() != head.checksum:
        raise FileError(Flaw.CHECKSUM)
    return value
