"""Many keys of one length in one argument, so that a question about hundreds of chunks is read at memory speed. A codec
only: who accepts such arguments is the commands' business.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

from kvhearth.store.protocol.limits import MAX_KEY_BYTES

MAGIC = b"\x00KVK"
"""What a packed argument begins with; no key may."""

MAX_PACKED_BYTES = 2**20
MAX_PACKED_KEYS = 16_384

_HEAD = struct.Struct("<4sH")


class PackedKeysError(ValueError):
    """Bytes that begin like packed keys and are none."""


def pack_keys(keys: Sequence[bytes]) -> bytes | None:
    """``keys`` as one argument: magic (4 bytes), length of each key (little-endian, 2 bytes), the keys.

    None when they cannot be packed: no keys, more than `MAX_PACKED_KEYS`, unlike lengths, or too long in all.
    """
    if not keys or len(keys) > MAX_PACKED_KEYS or len(set(map(len, keys))) != 1:
        return None
    packed = _HEAD.pack(MAGIC, len(keys[0])) + b"".join(keys)
    return packed if 0 < len(keys[0]) <= MAX_KEY_BYTES and len(packed) <= MAX_PACKED_BYTES else None


def unpack_keys(packed: bytes) -> list[bytes]:
    """What `pack_keys` packed.

    Raises:
        PackedKeysError: it is not that; the message says why.
    """
    if len(packed) < _HEAD.size:
        raise PackedKeysError(f"packed keys of {len(packed)} bytes")
    magic, length = _HEAD.unpack_from(packed)
    nbytes = len(packed) - _HEAD.size
    if magic != MAGIC or not 0 < length <= MAX_KEY_BYTES:
        raise PackedKeysError(f"packed keys with a key length of {length}, want 1 to {MAX_KEY_BYTES}")
    if not nbytes or nbytes % length or nbytes // length > MAX_PACKED_KEYS:
        raise PackedKeysError(
            f"packed keys of {length} bytes in {nbytes} bytes, want 1 to {MAX_PACKED_KEYS} whole keys"
        )
    return list(_layout(length, nbytes // length).unpack_from(packed, _HEAD.size))


@functools.lru_cache(maxsize=64)
def _layout(length: int, count: int) -> struct.Struct:
    return struct.Struct("<" + f"{length}s" * count)
