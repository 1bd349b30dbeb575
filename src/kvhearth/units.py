"""Sizes in bytes as people write them. Not a general unit library."""

from __future__ import annotations

import re
from fractions import Fraction

from kvhearth.errors import UserError

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?P<prefix>[kmgt]?)(?P<binary>i?)b?", re.IGNORECASE)
_LARGEST_BYTES = 2**60


def parse_bytes(text: str | int, *, where: str = "") -> int:
    """Bytes named by ``text``: ``"2GiB"`` or ``"2Gi"`` (powers of 1024), ``"2GB"`` or ``"2G"`` (of 1000), ``"4096"``.

    Args:
        text: the size; an int is taken as bytes.
        where: field or flag the text came from, for the error.

    Raises:
        UserError: not a size, not a whole number of bytes, or beyond 1 EiB.
    """
    remedy = "write bytes or a number with a unit, such as 512MiB, 2GiB or 10GB"
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or (match["binary"] and not match["prefix"]):
        raise UserError(f"{str(text)!r} is not a size", where=where, remedy=remedy)
    prefix = match["prefix"].lower()
    nbytes = Fraction(match["number"]) * (_BINARY[prefix] if match["binary"] else _DECIMAL[prefix])
    if nbytes.denominator != 1:
        raise UserError(f"{str(text)!r} is not a whole number of bytes", where=where, remedy=remedy)
    if nbytes > _LARGEST_BYTES:
        raise UserError(f"{str(text)!r} is more than 1 EiB", where=where, remedy=remedy)
    return int(nbytes)


def format_bytes(nbytes: int) -> str:
    """``nbytes`` for a reader, in powers of 1024 with at most two decimals: ``2 GiB``, ``1.5 MiB``, ``64 B``."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.2f}".rstrip("0").rstrip(".") + f" {unit}"
