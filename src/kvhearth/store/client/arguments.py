"""Checks of what callers hand to a client of the store. Wrong use is a ValueError, not a miss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvhearth.store.protocol.limits import MAX_KEY_BYTES
from kvhearth.store.protocol.packed import MAGIC

if TYPE_CHECKING:
    from typing_extensions import Buffer


def check_keys(keys: Sequence[bytes]) -> None:
    """Keys are bytes, neither empty nor too long, and do not begin like packed keys.

    Raises:
        ValueError: one is not.
    """
    for key in keys:
        if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_BYTES or key.startswith(MAGIC):
            raise ValueError(f"key {key!r:.80}: want 1 to {MAX_KEY_BYTES} bytes that do not begin like packed keys")


def writable_views(buffers: Sequence[Buffer], keys: Sequence[bytes]) -> list[memoryview]:
    """Each buffer as flat bytes to be written to, one a key.

    Raises:
        ValueError: not one a key, or one that is read-only or not contiguous.
    """
    if len(buffers) != len(keys):
        raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
    views = [memoryview(buffer) for buffer in buffers]
    if any(view.readonly or not view.c_contiguous for view in views):
        raise ValueError("a buffer to read into must be writable and contiguous")
    return [view.cast("B") for view in views]
