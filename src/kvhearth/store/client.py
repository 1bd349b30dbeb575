"""The client of a store: rows in and out of the caller's own buffers. Works against Redis and Valkey too.

A store is a cache: whatever goes wrong is a miss with a reason, within the call's deadline. Exceptions are for wrong
use of this class only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvhearth.metrics import MetricFamily
from kvhearth.metrics import store as m
from kvhearth.store.address import parse_address
from kvhearth.store.breaker import Breaker
from kvhearth.store.config import MAX_KEY_BYTES
from kvhearth.store.connections import Connections
from kvhearth.store.header import HEADER_BYTES, ForeignVersionError, Header, HeaderError, unpack_header
from kvhearth.store.outcomes import GetResult, Miss, MissReason, PutResult
from kvhearth.store.wire import WireConnection, encode_command

if TYPE_CHECKING:
    from typing_extensions import Buffer

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_WINDOW = 64
_MATCH_KEYS = 1024
# Misses that say nothing about whether the store is well.
_NOT_A_FAILURE = frozenset({MissReason.ABSENT, MissReason.BUSY, MissReason.TOO_LARGE, MissReason.BREAKER_OPEN})
_UNWELL = ("NOAUTH", "WRONGPASS", "NOPERM", "LOADING", "MASTERDOWN", "ERR max number of clients", "ERR Protocol error")


class Put(NamedTuple):
    """One row to store; length and checksum of ``header`` are filled in."""

    key: bytes
    header: Header
    row: Buffer


class StoreClient:
    """A store, seen from an engine. Thread-safe.

    Args:
        address: ``host:port`` or ``unix:/path``.
        timeout_seconds: how long a call may take in all, unless it says otherwise.
        password: for AUTH; None for none.
        max_connections: connections at once; a call beyond them waits, within its deadline.

    Raises:
        UserError: not an address. An unreachable store is no error.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_seconds: float = 1.0,
        password: str | None = None,
        max_connections: int = 4,
    ) -> None:
        if timeout_seconds <= 0 or max_connections < 1:
            raise ValueError(f"timeout_seconds={timeout_seconds}, max_connections={max_connections}: must be positive")
        self._address = parse_address(address)
        self._timeout_seconds = timeout_seconds
        self._connections = Connections(self._address, password, max_connections)
        self._breaker = Breaker()
        self._has_match = True
        self._count_lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}

    def get_into(self, key: bytes, buffer: Buffer, *, timeout_seconds: float | None = None) -> GetResult:
        """Fetch one row into ``buffer`` (writable, contiguous); see `get_many_into`."""
        return self.get_many_into([key], [buffer], timeout_seconds=timeout_seconds)[0]

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer], *, timeout_seconds: float | None = None
    ) -> list[GetResult]:
        """Fetch rows, each into its buffer, in one pipeline; one result a key, in order.

        A row is verified against its checksum; one that fails is a miss, and is deleted from the store.

        Raises:
            ValueError: bad key, not one buffer a key, or a read-only buffer.
        """
        _check_keys(keys)
        views = [_writable(buffer) for buffer in buffers]
        if len(views) != len(keys):
            raise ValueError(f"{len(keys)} keys and {len(views)} buffers")
        results: list[GetResult] = []
        corrupt: list[bytes] = []

        def exchange(wire: WireConnection, deadline: float) -> None:
            for start in range(0, len(keys), _WINDOW):
                window = keys[start : start + _WINDOW]
                wire.send([b"".join([encode_command(b"GET", key) for key in window])], deadline)
                for key in window:
                    result = _read_row(wire, key, views[len(results)], deadline)
                    results.append(result)
                    if result.reason is MissReason.CHECKSUM:
                        corrupt.append(key)
            if corrupt:
                wire.send([encode_command(b"DEL", *corrupt)], deadline)
                wire.integer(deadline)

        miss = self._call(exchange, timeout_seconds)[1]
        if miss is not None:
            results += [GetResult(miss.reason)] * (len(keys) - len(results))
        self._count("get", [result.reason for result in results])
        return results

    def put(self, key: bytes, header: Header, row: Buffer, *, timeout_seconds: float | None = None) -> PutResult:
        """Store one row; see `put_many`."""
        return self.put_many([Put(key, header, row)], timeout_seconds=timeout_seconds)[0]

    def put_many(self, puts: Sequence[Put], *, timeout_seconds: float | None = None) -> list[PutResult]:
        """Store rows in one pipeline, sent from the callers' buffers; one result a row, in order.

        Raises:
            ValueError: bad key, or a header field out of range.
        """
        _check_keys([put.key for put in puts])
        rows = [memoryview(put.row).cast("B") for put in puts]
        headers = [put.header.sealed(put.key, row).pack() for put, row in zip(puts, rows, strict=True)]
        results: list[PutResult] = []

        def exchange(wire: WireConnection, deadline: float) -> None:
            for start in range(0, len(puts), _WINDOW):
                stop = min(start + _WINDOW, len(puts))
                pieces: list[bytes | memoryview] = []
                for index in range(start, stop):
                    pieces += _set_pieces(puts[index].key, headers[index], rows[index])
                wire.send(pieces, deadline)
                for _ in range(start, stop):
                    results.append(_read_stored(wire, deadline))

        miss = self._call(exchange, timeout_seconds)[1]
        if miss is not None:
            results += [PutResult(miss.reason)] * (len(puts) - len(results))
        self._count("put", [result.reason for result in results])
        return results

    def match(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """How many leading ``keys`` the store has (touching them); 0 when it cannot be asked."""
        _check_keys(keys)
        matched = 0

        def exchange(wire: WireConnection, deadline: float) -> None:
            nonlocal matched
            for start in range(0, len(keys), _MATCH_KEYS):
                part = keys[start : start + _MATCH_KEYS]
                found = self._match_part(wire, part, deadline)
                matched += found
                if found < len(part):
                    return

        miss = self._call(exchange, timeout_seconds)[1]
        self._count("match", [miss.reason if miss else None])
        return matched

    def exists(self, key: bytes, *, timeout_seconds: float | None = None) -> bool:
        """Whether the store has ``key``, as far as it can be asked."""
        return bool(self._integer("exists", b"EXISTS", key, timeout_seconds))

    def delete(self, key: bytes, *, timeout_seconds: float | None = None) -> bool:
        """Drop ``key``; True when it was there."""
        return bool(self._integer("delete", b"DEL", key, timeout_seconds))

    def ping(self, *, timeout_seconds: float | None = None) -> MissReason | None:
        """None when the store answers, else why not."""

        def exchange(wire: WireConnection, deadline: float) -> None:
            wire.send([encode_command(b"PING")], deadline)
            wire.status(deadline)

        miss = self._call(exchange, timeout_seconds)[1]
        self._count("ping", [miss.reason if miss else None])
        return miss.reason if miss else None

    def stats(self, *, timeout_seconds: float | None = None) -> dict[str, str]:
        """The store's INFO as it stands, name to value; empty when it cannot be asked."""

        def exchange(wire: WireConnection, deadline: float) -> str:
            wire.send([encode_command(b"INFO")], deadline)
            length = wire.bulk_length(deadline) or 0
            if length > 2**20:
                raise Miss(MissReason.PROTOCOL, f"INFO of {length} bytes")
            text = bytearray(length)
            wire.read_into([memoryview(text)], deadline)
            wire.crlf(deadline)
            return text.decode("utf-8", "backslashreplace")

        text, miss = self._call(exchange, timeout_seconds)
        self._count("stats", [miss.reason if miss else None])
        lines = [line.partition(":") for line in (text or "").splitlines() if not line.startswith("#")]
        return {name: value for name, colon, value in lines if colon}

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Outcomes so far: (operation, ``ok`` or a `MissReason` value) → number."""
        with self._count_lock:
            return dict(self._counts)

    def metrics(self) -> Iterable[MetricFamily]:
        """For `Registry.collect_from`."""
        return [MetricFamily(m.CLIENT_CALLS, [(key, float(number)) for key, number in self.counts.items()])]

    def close(self) -> None:
        """Close every connection; later calls miss."""
        self._connections.close()

    def _call(
        self, exchange: Callable[[WireConnection, float], _T], timeout_seconds: float | None
    ) -> tuple[_T | None, Miss | None]:
        now = time.monotonic()
        deadline = now + (self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        trial = self._breaker.is_open
        if not self._breaker.allows(now):
            return None, Miss(MissReason.BREAKER_OPEN)
        try:
            answer = self._exchange(exchange, deadline)
        except Miss as miss:
            unwell = miss.reason is not MissReason.REFUSED or miss.detail.startswith(_UNWELL)
            if unwell and miss.reason not in _NOT_A_FAILURE and self._breaker.failed(time.monotonic(), was_trial=trial):
                _log.warning("store %s: %s; every call misses until it is back", self._address, miss)
            return None, miss
        if self._breaker.succeeded():
            _log.info("store %s answers again", self._address)
        return answer, None

    def _exchange(self, exchange: Callable[[WireConnection, float], _T], deadline: float) -> _T:
        wire = self._connections.take(deadline)
        while True:
            wire.begin()
            try:
                answer = exchange(wire, deadline)
            except BaseException as error:
                self._connections.discard(wire)
                # A kept connection may have been closed by the store since; nothing was answered, so ask once more.
                stale = wire.calls > 1 and not wire.answered
                if not (isinstance(error, Miss) and error.reason is MissReason.UNREACHABLE and stale):
                    raise
            else:
                if wire.clean:
                    self._connections.give_back(wire)
                else:  # what was not asked for would be taken for the next call's replies
                    self._connections.discard(wire)
                return answer
            wire = self._connections.take(deadline, fresh=True)

    def _match_part(self, wire: WireConnection, keys: Sequence[bytes], deadline: float) -> int:
        if self._has_match:
            wire.send([encode_command(b"KV.MATCH", *keys)], deadline)
            try:
                matched = wire.integer(deadline)
            except Miss as miss:
                if not miss.detail.startswith("ERR unknown command"):
                    raise
                self._has_match = False  # a Redis: ask key by key
            else:
                if matched > len(keys):
                    raise Miss(MissReason.PROTOCOL, f"{matched} of {len(keys)} keys match")
                return matched
        wire.send([b"".join([encode_command(b"EXISTS", key) for key in keys])], deadline)
        present = [wire.integer(deadline) for _ in keys]
        return present.index(0) if 0 in present else len(present)

    def _integer(self, operation: str, command: bytes, key: bytes, timeout_seconds: float | None) -> int:
        _check_keys([key])

        def exchange(wire: WireConnection, deadline: float) -> int:
            wire.send([encode_command(command, key)], deadline)
            return wire.integer(deadline)

        number, miss = self._call(exchange, timeout_seconds)
        self._count(operation, [miss.reason if miss else None])
        return number or 0

    def _count(self, operation: str, reasons: Iterable[MissReason | None]) -> None:
        with self._count_lock:
            for reason in reasons:
                key = (operation, "ok" if reason is None else reason.value)
                self._counts[key] = self._counts.get(key, 0) + 1


def _read_row(wire: WireConnection, key: bytes, buffer: memoryview, deadline: float) -> GetResult:
    try:
        length = wire.bulk_length(deadline)
    except Miss as miss:
        if miss.reason is MissReason.REFUSED and not miss.detail.startswith(_UNWELL):
            return GetResult(miss.reason)  # an error in place of this value; the rest of the pipeline stands
        raise
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


def _set_pieces(key: bytes, header: bytes, row: memoryview) -> list[bytes | memoryview]:
    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (len(key), key, len(header) + len(row), header)
    return [head, row, b"\r\n"]


def _read_stored(wire: WireConnection, deadline: float) -> PutResult:
    try:
        wire.status(deadline)
    except Miss as miss:
        refused = miss.reason in (MissReason.REFUSED, MissReason.TOO_LARGE) and not miss.detail.startswith(_UNWELL)
        if not refused:
            raise
        return PutResult(miss.reason)
    return PutResult(None)


def _check_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"key {key!r:.80}: want 1 to {MAX_KEY_BYTES} bytes")


def _writable(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise ValueError("a buffer to read into must be writable and contiguous")
    return view.cast("B")
