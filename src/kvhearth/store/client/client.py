"""The client of a store: rows in and out of the caller's own buffers. Works against Redis and Valkey too.

A store is a cache: whatever goes wrong is a miss with a reason, within the call's deadline. Exceptions are for wrong
use of this class only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvhearth.metrics import MetricFamily
from kvhearth.store.breaker import Breaker
from kvhearth.store.client.arguments import check_keys, writable_views
from kvhearth.store.client.connections import Connections
from kvhearth.store.client.outcomes import GetResult, Miss, MissReason, PutResult, RecordResult
from kvhearth.store.client.questions import Questions
from kvhearth.store.client.rows import is_unwell
from kvhearth.store.client.tally import Tally
from kvhearth.store.client.transfers import Transfers
from kvhearth.store.client.wire import WireConnection, encode_command
from kvhearth.store.protocol.address import parse_address
from kvhearth.store.protocol.header import Header
from kvhearth.store.protocol.limits import DEFAULT_USER
from kvhearth.store.protocol.tls import ClientTls, TlsSettings

if TYPE_CHECKING:
    from typing_extensions import Buffer

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_ASK_KEYS = 1024
_ABSENT = ord("-")
MAX_RECORD_BYTES = 64 * 1024
PIN_SECONDS = 7 * 86_400
"""How long a pin holds unless it says otherwise: pins whose owner is gone end by themselves."""
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
        user: whose password it is.
        tls: for TLS over TCP; None for none.
        max_connections: connections at once; a call beyond them waits, within its deadline.
        shared_memory: over a unix socket, copy rows straight out of and into the store's memory where it lets us.

    Raises:
        UserError: not an address, or a file of ``tls`` cannot be used. An unreachable store is no error.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_seconds: float = 1.0,
        password: str | None = None,
        user: str = DEFAULT_USER,
        tls: TlsSettings | None = None,
        max_connections: int = 4,
        shared_memory: bool = True,
    ) -> None:
        if timeout_seconds <= 0 or max_connections < 1:
            raise ValueError(f"timeout_seconds={timeout_seconds}, max_connections={max_connections}: must be positive")
        self._address = parse_address(address)
        self._timeout_seconds = timeout_seconds
        secure = ClientTls(tls) if tls is not None and not self._address.is_unix else None
        login = (user, password) if password is not None else None
        self._connections = Connections(self._address, max_connections, login=login, secure=secure)
        self._breaker = Breaker()
        self._questions = Questions()
        self._tally = Tally()
        self._transfers = Transfers(self._address, self._tally, shared=shared_memory)

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
        check_keys(keys)
        views = writable_views(buffers, keys)
        results: list[GetResult | None] = [None] * len(keys)

        def exchange(wire: WireConnection, deadline: float) -> None:
            self._transfers.get(wire, keys, views, results, deadline)

        miss = self._call(exchange, timeout_seconds)[1]
        missed = GetResult(miss.reason if miss is not None else MissReason.PROTOCOL)
        done = [missed if result is None else result for result in results]
        self._tally.count("get", [result.reason for result in done])
        return done

    def put(self, key: bytes, header: Header, row: Buffer, *, timeout_seconds: float | None = None) -> PutResult:
        """Store one row; see `put_many`."""
        return self.put_many([Put(key, header, row)], timeout_seconds=timeout_seconds)[0]

    def put_many(self, puts: Sequence[Put], *, timeout_seconds: float | None = None) -> list[PutResult]:
        """Store rows in one pipeline, sent from the callers' buffers; one result a row, in order.

        Raises:
            ValueError: bad key, or a header field out of range.
        """
        keys = [put.key for put in puts]
        check_keys(keys)
        rows = [memoryview(put.row).cast("B") for put in puts]
        headers = [put.header.sealed(put.key, row).pack() for put, row in zip(puts, rows, strict=True)]
        results: list[PutResult | None] = [None] * len(puts)

        def exchange(wire: WireConnection, deadline: float) -> None:
            self._transfers.put(wire, keys, headers, rows, results, deadline)

        miss = self._call(exchange, timeout_seconds)[1]
        missed = PutResult(miss.reason if miss is not None else MissReason.PROTOCOL)
        done = [missed if result is None else result for result in results]
        self._tally.count("put", [result.reason for result in done])
        return done

    def match(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """How many leading ``keys`` the store has (touching them); 0 when it cannot be asked."""
        return len(self.match_tiers(keys, timeout_seconds=timeout_seconds))

    def match_tiers(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> bytes:
        """The tier of each leading key that the store has, a letter each: ``d`` DRAM, ``k`` disk, ``o`` object."""
        check_keys(keys)
        found = bytearray()

        def exchange(wire: WireConnection, deadline: float) -> None:
            for start in range(0, len(keys), _ASK_KEYS):
                part = keys[start : start + _ASK_KEYS]
                letters = self._questions.leading(wire, part, deadline)
                found.extend(letters)
                if len(letters) < len(part):
                    return

        miss = self._call(exchange, timeout_seconds)[1]
        self._tally.count("match", [miss.reason if miss else None])
        return bytes(found)

    def exists_many(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> list[bool]:
        """Whether the store has each of ``keys`` (touching them), as far as it can be asked."""
        return [letter != _ABSENT for letter in self.where(keys, timeout_seconds=timeout_seconds)]

    def where(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> bytes:
        """The tier of each key, a letter each as in `match_tiers`; ``-`` for those that are nowhere, or not known to
        be anywhere as the store could not be asked."""
        check_keys(keys)
        found = bytearray()

        def exchange(wire: WireConnection, deadline: float) -> None:
            for start in range(0, len(keys), _ASK_KEYS):
                found.extend(self._questions.where(wire, keys[start : start + _ASK_KEYS], deadline))

        miss = self._call(exchange, timeout_seconds)[1]
        self._tally.count("exists", [miss.reason if miss else None])
        return bytes(found).ljust(len(keys), bytes([_ABSENT]))

    def pin(self, keys: Sequence[bytes], *, seconds: int = PIN_SECONDS, timeout_seconds: float | None = None) -> int:
        """Keep values from eviction for so many seconds; how many of ``keys`` are pinned now.

        0 on a Redis, which cannot; and when pins already take half of the store, or would with these: it pins either
        every one of up to 1,024 keys that is there, or none.
        """
        return self._ask_number("pin", [b"KV.PIN", b"%d" % seconds], keys, timeout_seconds)

    def unpin(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """Let values be evicted again; how many of ``keys`` were pinned."""
        return self._ask_number("unpin", [b"KV.UNPIN"], keys, timeout_seconds)

    def prefetch(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """Ask the store to lift values into its DRAM; how many of ``keys`` are there already or on their way."""
        return self._ask_number("prefetch", [b"KV.PREFETCH"], keys, timeout_seconds)

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
        check_keys(keys)

        def exchange(wire: WireConnection, deadline: float) -> None:
            for start in range(0, len(keys), _ASK_KEYS):
                wire.send([encode_command(b"DEL", *keys[start : start + _ASK_KEYS])], deadline)
                wire.integer(deadline)

        miss = self._call(exchange, timeout_seconds)[1]
        self._tally.count("delete", [miss.reason if miss else None])
        return miss is None

    def ping(self, *, timeout_seconds: float | None = None) -> MissReason | None:
        """None when the store answers, else why not."""

        def exchange(wire: WireConnection, deadline: float) -> None:
            wire.send([encode_command(b"PING")], deadline)
            wire.status(deadline)

        miss = self._call(exchange, timeout_seconds)[1]
        self._tally.count("ping", [miss.reason if miss else None])
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
        self._tally.count("stats", [miss.reason if miss else None])
        lines = [line.partition(":") for line in (text or "").splitlines() if not line.startswith("#")]
        return {name: value for name, colon, value in lines if colon}

    @property
    def is_down(self) -> bool:
        """Whether calls are turned away because recent ones failed."""
        return self._breaker.is_open

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Outcomes so far: (operation, ``ok`` or a `MissReason` value) → number."""
        return self._tally.outcomes

    def metrics(self) -> Iterable[MetricFamily]:
        """For `Registry.collect_from`."""
        return self._tally.metrics()

    def close(self) -> None:
        """Close every connection; later calls miss."""
        self._connections.close()
        self._transfers.close()

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

    def _ask_number(
        self, operation: str, command: Sequence[bytes], keys: Sequence[bytes], timeout_seconds: float | None
    ) -> int:
        check_keys(keys)

        def exchange(wire: WireConnection, deadline: float) -> int:
            parts = (keys[start : start + _ASK_KEYS] for start in range(0, len(keys), _ASK_KEYS))
            return sum(self._questions.number(wire, command, part, deadline) for part in parts)

        number, miss = self._call(exchange, timeout_seconds)
        self._tally.count(operation, [miss.reason if miss else None])
        return number or 0

    def _integer(self, operation: str, command: bytes, key: bytes, timeout_seconds: float | None) -> int:
        check_keys([key])

        def exchange(wire: WireConnection, deadline: float) -> int:
            wire.send([encode_command(command, key)], deadline)
            return wire.integer(deadline)

        number, miss = self._call(exchange, timeout_seconds)
        self._tally.count(operation, [miss.reason if miss else None])
        return number or 0
