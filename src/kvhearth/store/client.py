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
from kvhearth.store.header import Header
from kvhearth.store.outcomes import GetResult, Miss, MissReason, PutResult, RecordResult
from kvhearth.store.questions import Questions
from kvhearth.store.rows import is_unwell, read_row, read_stored, set_pieces
from kvhearth.store.wire import WireConnection, encode_command

if TYPE_CHECKING:
    from typing_extensions import Buffer

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_WINDOW = 64
_ASK_KEYS = 1024
MAX_RECORD_BYTES = 64 * 1024
# Misses that say nothing about whether the store is well.
_NOT_A_FAILURE = frozenset({MissReason.ABSENT, MissReason.BUSY, MissReason.TOO_LARGE, MissReason.BREAKER_OPEN})


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
        self._questions = Questions()
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
                    result = read_row(wire, key, views[len(results)], deadline)
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
                    pieces += set_pieces(puts[index].key, headers[index], rows[index])
                wire.send(pieces, deadline)
                for _ in range(start, stop):
                    results.append(read_stored(wire, deadline))

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
            for start in range(0, len(keys), _ASK_KEYS):
                part = keys[start : start + _ASK_KEYS]
                found = self._questions.match(wire, part, deadline)
                matched += found
                if found < len(part):
                    return

        miss = self._call(exchange, timeout_seconds)[1]
        self._count("match", [miss.reason if miss else None])
        return matched

    def exists_many(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> list[bool]:
        """Whether the store has each of ``keys`` (touching them), as far as it can be asked."""
        _check_keys(keys)
        found: list[bool] = []

        def exchange(wire: WireConnection, deadline: float) -> None:
            for start in range(0, len(keys), _ASK_KEYS):
                found.extend(self._questions.exists(wire, keys[start : start + _ASK_KEYS], deadline))

        miss = self._call(exchange, timeout_seconds)[1]
        self._count("exists", [miss.reason if miss else None])
        return found + [False] * (len(keys) - len(found))

    def pin(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """Keep values from eviction; how many of ``keys`` are pinned now.

        0 on a Redis, which cannot; and when pins already take half of the store, or would with these: it pins either
        every one of up to 1,024 keys that is there, or none.
        """
        return self._set_pins("pin", b"KV.PIN", keys, timeout_seconds)

    def unpin(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """Let values be evicted again; how many of ``keys`` were pinned."""
        return self._set_pins("unpin", b"KV.UNPIN", keys, timeout_seconds)

    def put_record(self, key: bytes, record: bytes, *, timeout_seconds: float | None = None) -> PutResult:
        """Store a few bytes of any kind (JSON, say), sealed like a row.

        Raises:
            ValueError: bad key, or more than ``MAX_RECORD_BYTES``.
        """
        if len(record) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(record)} bytes is longer than {MAX_RECORD_BYTES}")
        return self.put(key, Header(), record, timeout_seconds=timeout_seconds)

    def get_record(self, key: bytes, *, timeout_seconds: float | None = None) -> RecordResult:
        """Fetch what `put_record` stored."""
        buffer = bytearray(MAX_RECORD_BYTES)
        result = self.get_into(key, buffer, timeout_seconds=timeout_seconds)
        return RecordResult(result.reason, bytes(buffer[: result.nbytes]) if result.hit else None)

    def exists(self, key: bytes, *, timeout_seconds: float | None = None) -> bool:
        """Whether the store has ``key``, as far as it can be asked."""
        return bool(self._integer("exists", b"EXISTS", key, timeout_seconds))

    def delete(self, key: bytes, *, timeout_seconds: float | None = None) -> bool:
        """Drop ``key``; True when it was there."""
        return bool(self._integer("delete", b"DEL", key, timeout_seconds))

    def delete_many(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> bool:
        """Drop ``keys``; whether the store has done so."""
        _check_keys(keys)

        def exchange(wire: WireConnection, deadline: float) -> None:
            for start in range(0, len(keys), _ASK_KEYS):
                wire.send([encode_command(b"DEL", *keys[start : start + _ASK_KEYS])], deadline)
                wire.integer(deadline)

        miss = self._call(exchange, timeout_seconds)[1]
        self._count("delete", [miss.reason if miss else None])
        return miss is None

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
    def is_down(self) -> bool:
        """Whether calls are turned away because recent ones failed."""
        return self._breaker.is_open

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
            unwell = miss.reason is not MissReason.REFUSED or is_unwell(miss)
            if unwell and miss.reason not in _NOT_A_FAILURE and self._breaker.failed(time.monotonic(), was_trial=trial):
                _log.warning("store %s: %s; every call misses until it is back", self._address, miss)
            return None, miss.with_traceback(None)  # else its frames keep the caller's buffers alive
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

    def _set_pins(self, operation: str, command: bytes, keys: Sequence[bytes], timeout_seconds: float | None) -> int:
        _check_keys(keys)

        def exchange(wire: WireConnection, deadline: float) -> int:
            parts = (keys[start : start + _ASK_KEYS] for start in range(0, len(keys), _ASK_KEYS))
            return sum(self._questions.set_pins(wire, command, part, deadline) for part in parts)

        number, miss = self._call(exchange, timeout_seconds)
        self._count(operation, [miss.reason if miss else None])
        return number or 0

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


def _check_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"key {key!r:.80}: want 1 to {MAX_KEY_BYTES} bytes")


def _writable(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise ValueError("a buffer to read into must be writable and contiguous")
    return view.cast("B")
