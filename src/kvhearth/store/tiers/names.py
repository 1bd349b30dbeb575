"""What the disk tier calls its files: a name says everything that the index needs, so that finding 200,000 files again
takes their folders' listings only, not a read or a stat of each. No I/O.

``ab/3f/<written>-<nbytes>-<position>-<parent>-<recompute_ns>-<key>``: hexadecimal numbers and the key in URL-safe
base64, or ``=`` and a hash of the key where that would be too long for a file name. The folders come from a hash of the
key. What a name says is a hint; the file's own head and checksum decide what it holds.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import NamedTuple

import xxhash

from kvhearth.store.protocol.header import HEADER_BYTES, HeaderError, unpack_header

TOPS = 64
LEAVES = TOPS * TOPS
"""Folders of the second level: about 50 files in each at 200,000, 250 at a million."""

_LONGEST_NAME = 255
_LONGEST_FACTS = 5 + 16 + 8 + 8 + 16 + 16
_LONGEST_KEY_TEXT = _LONGEST_NAME - _LONGEST_FACTS
_NAME = re.compile(
    r"([0-9a-f]{1,16})-([0-9a-f]{1,8})-([0-9a-f]{1,8})-([0-9a-f]{1,16})-([0-9a-f]{1,16})-(=[0-9a-f]{32}|[A-Za-z0-9_-]+)"
)


class Entry(NamedTuple):
    """One value on disk, as its name tells.

    Attributes:
        key: the key.
        nbytes: length of the value, below 4 GiB.
        position, parent, recompute_ns: from the value's header (see `header.Header`), zeros where there is none;
            ``recompute_ns`` at most 2**63 - 1.
        written: Unix microseconds of the write, so that recency outlives a restart. No two writes of a tier have the
            same, so that a file is never taken for one that was in its place before.
    """

    key: bytes
    nbytes: int
    position: int
    parent: int
    recompute_ns: int
    written: int


def entry_of(key: bytes, views: list[memoryview], written: int) -> Entry:
    """The entry of a value about to be written; see `Entry.written`."""
    start = b""
    for view in views:
        start += bytes(view[: HEADER_BYTES - len(start)])
        if len(start) == HEADER_BYTES:
            break
    nbytes = sum(view.nbytes for view in views)
    try:
        header = unpack_header(start)
    except HeaderError:
        return Entry(key, nbytes, 0, 0, 0, written)
    return Entry(key, nbytes, header.position, header.parent, min(header.recompute_ns, 2**63 - 1), written)


def leaf_of(key: bytes) -> int:
    """Number of the folder that holds the key's file, below ``LEAVES``."""
    return xxhash.xxh3_64_intdigest(key) % LEAVES


def leaf_path(leaf: int) -> str:
    """The folder's path inside the tier's."""
    return f"{leaf // TOPS:02x}/{leaf % TOPS:02x}"


def path_of(entry: Entry) -> str:
    """The file's path inside the tier's folder."""
    text = base64.urlsafe_b64encode(entry.key).rstrip(b"=").decode()
    if len(text) > _LONGEST_KEY_TEXT:
        text = "=" + xxhash.xxh3_128_hexdigest(entry.key)
    numbers = f"{entry.written:x}-{entry.nbytes:x}-{entry.position:x}-{entry.parent:x}-{entry.recompute_ns:x}"
    return f"{leaf_path(leaf_of(entry.key))}/{numbers}-{text}"


def parse_name(name: str) -> Entry | None:
    """The entry that a file name tells, with an empty key where only the file itself knows it; None: not ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    written, nbytes, position, parent, recompute_ns, text = match.groups()
    key = b""
    if text[0] != "=":
        try:
            key = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        except binascii.Error:
            return None
    recompute = int(recompute_ns, 16)
    if recompute >= 2**63:
        return None
    return Entry(key, int(nbytes, 16), int(position, 16), int(parent, 16), recompute, int(written, 16))
