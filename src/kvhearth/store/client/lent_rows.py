"""Rows that a client copies out of and into the store's memory itself: the exchange of grants for them over one
connection, some rows a round trip.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvhearth.store.client.mapping import Mapping
from kvhearth.store.client.outcomes import GetResult, Miss, MissReason, PutResult
from kvhearth.store.client.rows import verified
from kvhearth.store.client.wire import WireConnection, encode_command
from kvhearth.store.protocol.grants import Grant, GrantFormatError, Refusal, pack_numbers, pack_sizes, unpack_grants
from kvhearth.store.protocol.header import HEADER_BYTES
from kvhearth.store.protocol.packed import pack_keys

_WINDOW = 64
_WINDOW_BYTES = 32 * 2**20
_SHARE = 16
_REPLY_BYTES = 2**20
_WHY = {
    Refusal.ABSENT: MissReason.ABSENT,
    Refusal.NO_ROOM: MissReason.REFUSED,
    Refusal.TOO_LARGE: MissReason.TOO_LARGE,
    Refusal.BAD_KEY: MissReason.REFUSED,
}


class Lender:
    """Grants from the store over ``wire``, for use in its memory. Every method raises `Miss`, and then what was granted
    ends with the connection."""

    def __init__(self, wire: WireConnection, pool_bytes: int) -> None:
        self._wire = wire
        self._pool_bytes = pool_bytes
        self._leased: list[int] = []

    def lease(self, keys: Sequence[bytes], deadline: float) -> list[Grant]:
        """Where the values under ``keys`` lie, in place of the leases of before."""
        self._wire.send([self._release(), encode_command(b"KV.LEASE", *_packed(keys))], deadline)
        grants = self._grants(len(keys), deadline)
        self._leased = [grant.number for grant in grants if grant.refusal is None]
        return grants

    def end(self, deadline: float) -> None:
        """Give back the last leases, without waiting for the store."""
        self._wire.send([self._release()], deadline)

    def reserve(
        self, keys: Sequence[bytes], sizes: Sequence[int], deadline: float, *, commit: Sequence[int] = ()
    ) -> tuple[list[Grant], list[bool]]:
        """Where values of these lengths go, to be put under ``keys``; and, in the same round trip, what `commit` says
        of values that are in place."""
        command = encode_command(b"KV.RESERVE", pack_sizes(sizes), *_packed(keys))
        self._wire.send([_commit_command(commit), command], deadline)
        stored = self._stored(commit, deadline)
        return self._grants(len(keys), deadline), stored

    def commit(self, numbers: Sequence[int], deadline: float) -> list[bool]:
        """Publish values whose bytes are all in place; whether the store keeps each."""
        self._wire.send([_commit_command(numbers)], deadline)
        return self._stored(numbers, deadline)

    def _stored(self, numbers: Sequence[int], deadline: float) -> list[bool]:
        if not numbers:
            return []
        letters = self._bulk(deadline)
        if len(letters) != len(numbers):
            raise Miss(MissReason.PROTOCOL, f"{len(letters)} answers for {len(numbers)} uploads")
        return [letter == ord("s") for letter in letters]

    def _release(self) -> bytes:
        """The command that gives the leases back, to be sent without waiting for its answer; nothing without any."""
        if not self._leased:
            return b""
        command = encode_command(b"KV.RELEASE", pack_numbers(self._leased))
        self._leased = []
        self._wire.owe()
        return command

    def _grants(self, count: int, deadline: float) -> list[Grant]:
        try:
            return unpack_grants(self._bulk(deadline), count, self._pool_bytes)
        except GrantFormatError as error:
            raise Miss(MissReason.PROTOCOL, str(error)) from None

    def _bulk(self, deadline: float) -> bytes:
        length = self._wire.bulk_length(deadline) or 0
        if length > _REPLY_BYTES:
            raise Miss(MissReason.PROTOCOL, f"{length} bytes of grants")
        raw = bytearray(length)
        self._wire.read_into([memoryview(raw)], deadline)
        self._wire.crlf(deadline)
        return bytes(raw)


def get_lent(
    wire: WireConnection,
    mapping: Mapping,
    keys: Sequence[bytes],
    views: Sequence[memoryview],
    results: list[GetResult | None],
    deadline: float,
) -> list[int]:
    """Copy the rows under ``keys`` into ``views``, each verified there: what is shared may change at any time. Fills
    ``results``; the places of those that the store would not lend, but may send.

    Raises:
        Miss: the call cannot go on.
    """
    lender = Lender(wire, mapping.nbytes)
    unlent = []
    for window in _windows([len(view) for view in views], mapping.nbytes):
        grants = lender.lease([keys[place] for place in window], deadline)
        for place, grant in zip(window, grants, strict=True):
            if grant.refusal is Refusal.BUSY:
                unlent.append(place)
            elif grant.refusal is not None:
                results[place] = GetResult(_WHY[grant.refusal])
            else:
                _check(deadline)
                results[place] = _copy_row(mapping, grant, keys[place], views[place])
    lender.end(deadline)
    return unlent


def put_lent(
    wire: WireConnection,
    mapping: Mapping,
    keys: Sequence[bytes],
    headers: Sequence[bytes],
    rows: Sequence[memoryview],
    results: list[PutResult | None],
    deadline: float,
) -> list[int]:
    """Copy ``rows`` behind their packed ``headers`` into the store. Fills ``results``; the places of those for which
    the store lends no memory, but that it may receive.

    Raises:
        Miss: the call cannot go on; nothing that is not whole becomes visible.
    """
    lender = Lender(wire, mapping.nbytes)
    unlent = []
    sizes = [HEADER_BYTES + len(row) for row in rows]
    placed: list[tuple[int, int]] = []  # what is in place, and is published with the next round trip
    for window in _windows(sizes, mapping.nbytes):
        grants, stored = lender.reserve(
            [keys[place] for place in window],
            [sizes[place] for place in window],
            deadline,
            commit=[number for _, number in placed],
        )
        _note_stored(placed, stored, results)
        placed = []
        for place, grant in zip(window, grants, strict=True):
            if grant.refusal is Refusal.BUSY:
                unlent.append(place)
            elif grant.refusal is not None:
                results[place] = PutResult(_WHY[grant.refusal])
            else:
                _check(deadline)
                mapping.copy_in([memoryview(headers[place]), rows[place]], grant.pieces)
                placed.append((place, grant.number))
    if placed:
        _note_stored(placed, lender.commit([number for _, number in placed], deadline), results)
    return unlent


def _note_stored(placed: Sequence[tuple[int, int]], stored: Sequence[bool], results: list[PutResult | None]) -> None:
    for (place, _), kept in zip(placed, stored, strict=True):
        results[place] = PutResult(None if kept else MissReason.REFUSED)


def _packed(keys: Sequence[bytes]) -> Sequence[bytes]:
    packed = pack_keys(keys)
    return keys if packed is None else [packed]


def _commit_command(numbers: Sequence[int]) -> bytes:
    return encode_command(b"KV.COMMIT", pack_numbers(numbers)) if numbers else b""


def _copy_row(mapping: Mapping, grant: Grant, key: bytes, view: memoryview) -> GetResult:
    nbytes = grant.nbytes - HEADER_BYTES
    if not 0 <= nbytes <= len(view):
        return GetResult(MissReason.HEADER if nbytes < 0 else MissReason.TOO_LARGE)
    raw = bytearray(HEADER_BYTES)
    mapping.copy_out(grant.pieces, [memoryview(raw), view[:nbytes]])
    return verified(raw, key, view[:nbytes])


def _windows(sizes: Sequence[int], pool_bytes: int) -> Iterator[range]:
    """Places that go together, so that neither many loans nor much of the pool are held at once."""
    limit = min(_WINDOW_BYTES, pool_bytes // _SHARE)
    start, taken = 0, 0
    for place, nbytes in enumerate(sizes):
        if place > start and (taken + nbytes > limit or place - start == _WINDOW):
            yield range(start, place)
            start, taken = place, 0
        taken += nbytes
    if start < len(sizes):
        yield range(start, len(sizes))


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise Miss(MissReason.TIMEOUT)
