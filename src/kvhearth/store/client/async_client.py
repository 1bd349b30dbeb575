"""The client of a store for asyncio programs: the router, tools, the emulator. Same outcomes as `StoreClient`.

A store is a cache: whatever goes wrong is a miss with a reason, within the call's deadline. Exceptions are for wrong
use of this class only, and for the cancellation of a call, which closes its connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvhearth.metrics import MetricFamily
from kvhearth.metrics import store as m
from kvhearth.store.breaker import Breaker
from kvhearth.store.client import async_exchanges as ask
from kvhearth.store.client.arguments import check_keys, writable_views
from kvhearth.store.client.async_wire import AsyncWire, open_wire
from kvhearth.store.client.client import Put
from kvhearth.store.client.outcomes import GetResult, Miss, MissReason, PutResult
from kvhearth.store.client.rows import is_unwell
from kvhearth.store.protocol.address import parse_address
from kvhearth.store.protocol.header import Header
from kvhearth.store.protocol.limits import DEFAULT_USER
from kvhearth.store.protocol.tls import ClientTls, TlsSettings

if TYPE_CHECKING:
    from typing_extensions import Buffer

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# Misses that say nothing about whether the store is well.
_NOT_A_FAILURE = frozenset({MissReason.ABSENT, MissReason.BUSY, MissReason.TOO_LARGE, MissReason.BREAKER_OPEN})


class AsyncStoreClient:
    """A store, seen from one event loop. Not thread-safe; calls may overlap.

    Args:
        address: ``host:port`` or ``unix:/path``.
        timeout_seconds: how long a call may take in all, unless it says otherwise.
        password: for AUTH; None for none.
        user: whose password it is.
        tls: for TLS over TCP; None for none.
        max_connections: connections at once; a call beyond them waits, within its deadline.

    Raises:
        UserError: not an address, or a TLS file cannot be used. An unreachable store is no error.
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
    ) -> None:
        if timeout_seconds <= 0 or max_connections < 1:
            raise ValueError(f"timeout_seconds={timeout_seconds}, max_connections={max_connections}: must be positive")
        self._address = parse_address(address)
        self._timeout_seconds = timeout_seconds
        self._tls = ClientTls(tls) if tls is not None else None
        self._auth = ask.auth_command(user, password)
        self._free = asyncio.Semaphore(max_connections)
        self._idle: list[AsyncWire] = []
        self._closed = False
        self._breaker = Breaker()
        self._questions = ask.Questions()
        self._counts: dict[tuple[str, str], int] = {}

    async def get_into(self, key: bytes, buffer: Buffer, *, timeout_seconds: float | None = None) -> GetResult:
        """Fetch one row into ``buffer`` (writable, contiguous); see `get_many_into`."""
        return (await self.get_many_into([key], [buffer], timeout_seconds=timeout_seconds))[0]

    async def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer], *, timeout_seconds: float | None = None
    ) -> list[GetResult]:
        """Fetch rows, each into its buffer, in one pipeline; one result a key, in order.

        A row is verified against its checksum; one that fails is a miss, and is deleted from the store. Buffers are
        the caller's again once the call has returned, or was cancelled.

        Raises:
            ValueError: bad key, not one buffer a key, or a read-only buffer.
        """
        check_keys(keys)
        views = writable_views(buffers, keys)
        results: list[GetResult] = []
        miss = (await self._call(lambda wire: ask.get_rows(wire, keys, views, results), timeout_seconds))[1]
        if miss is not None:
            results += [GetResult(miss.reason)] * (len(keys) - len(results))
        self._count("get", [result.reason for result in results])
        return results

    async def put(self, key: bytes, header: Header, row: Buffer, *, timeout_seconds: float | None = None) -> PutResult:
        """Store one row; see `put_many`."""
        return (await self.put_many([Put(key, header, row)], timeout_seconds=timeout_seconds))[0]

    async def put_many(self, puts: Sequence[Put], *, timeout_seconds: float | None = None) -> list[PutResult]:
        """Store rows in one pipeline; one result a row, in order. Rows must not change while the call is under way.

        Raises:
            ValueError: bad key, or a header field out of range.
        """
        check_keys([put.key for put in puts])
        rows = [memoryview(put.row).cast("B") for put in puts]
        headers = [put.header.sealed(put.key, row).pack() for put, row in zip(puts, rows, strict=True)]
        keys = [put.key for put in puts]
        results: list[PutResult] = []
        miss = (await self._call(lambda wire: ask.put_rows(wire, keys, headers, rows, results), timeout_seconds))[1]
        if miss is not None:
            results += [PutResult(miss.reason)] * (len(puts) - len(results))
        self._count("put", [result.reason for result in results])
        return results

    async def match(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """How many leading ``keys`` the store has (touching them); 0 when it cannot be asked."""
        return len(await self.match_tiers(keys, timeout_seconds=timeout_seconds))

    async def match_tiers(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> bytes:
        """The tier of each leading key that the store has, a letter each: ``d`` DRAM, ``k`` disk, ``o`` object."""
        check_keys(keys)
        letters, miss = await self._call(lambda wire: self._questions.leading(wire, keys), timeout_seconds)
        self._count("match", [miss.reason if miss else None])
        return letters or b""

    async def exists_many(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> list[bool]:
        """Whether the store has each of ``keys`` (touching them), as far as it can be asked."""
        return [letter != ask.ABSENT[0] for letter in await self.where(keys, timeout_seconds=timeout_seconds)]

    async def where(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> bytes:
        """The tier of each key, a letter each as in `match_tiers`; ``-`` for those that are nowhere, or not known to
        be anywhere as the store could not be asked."""
        check_keys(keys)
        letters, miss = await self._call(lambda wire: self._questions.where(wire, keys), timeout_seconds)
        self._count("exists", [miss.reason if miss else None])
        return letters if letters is not None else ask.ABSENT * len(keys)

    async def prefetch(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """Ask the store to lift values into its DRAM; how many of ``keys`` are there already or on their way."""
        check_keys(keys)
        number, miss = await self._call(lambda wire: self._questions.prefetch(wire, keys), timeout_seconds)
        self._count("prefetch", [miss.reason if miss else None])
        return number or 0

    async def delete_many(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> bool:
        """Drop ``keys``; whether the store has done so."""
        check_keys(keys)
        miss = (await self._call(lambda wire: ask.delete(wire, keys), timeout_seconds))[1]
        self._count("delete", [miss.reason if miss else None])
        return miss is None

    async def ping(self, *, timeout_seconds: float | None = None) -> MissReason | None:
        """None when the store answers, else why not."""
        miss = (await self._call(ask.ping, timeout_seconds))[1]
        self._count("ping", [miss.reason if miss else None])
        return miss.reason if miss else None

    async def stats(self, *, timeout_seconds: float | None = None) -> dict[str, str]:
        """The store's INFO as it stands, name to value; empty when it cannot be asked."""
        text, miss = await self._call(ask.info, timeout_seconds)
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
        return dict(self._counts)

    def metrics(self) -> Iterable[MetricFamily]:
        """For `Registry.collect_from`."""
        return [MetricFamily(m.CLIENT_CALLS, [(key, float(number)) for key, number in self.counts.items()])]

    def close(self) -> None:
        """Close the idle connections now, the others as their calls end; later calls miss."""
        self._closed = True
        self._drop_idle()

    # ---- calls

    async def _call(
        self, exchange: Callable[[AsyncWire], Awaitable[_T]], timeout_seconds: float | None
    ) -> tuple[_T | None, Miss | None]:
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        trial = self._breaker.is_open
        if not self._breaker.allows(time.monotonic()):
            return None, Miss(MissReason.BREAKER_OPEN)
        try:
            answer = await self._within(seconds, exchange)
        except Miss as miss:
            unwell = miss.reason is not MissReason.REFUSED or is_unwell(miss)
            if unwell and miss.reason not in _NOT_A_FAILURE and self._breaker.failed(time.monotonic(), was_trial=trial):
                _log.warning("store %s: %s; every call misses until it is back", self._address, miss)
            return None, miss.with_traceback(None)  # else its frames keep the caller's buffers alive
        if self._breaker.succeeded():
            _log.info("store %s answers again", self._address)
        return answer, None

    async def _within(self, seconds: float, exchange: Callable[[AsyncWire], Awaitable[_T]]) -> _T:
        waiting = True
        try:
            async with asyncio.timeout(seconds):
                async with self._free:
                    waiting = False
                    return await self._exchange(exchange)
        except TimeoutError:
            if waiting:
                raise Miss(MissReason.BUSY, "all connections are in use") from None
            raise Miss(MissReason.TIMEOUT) from None

    async def _exchange(self, exchange: Callable[[AsyncWire], Awaitable[_T]]) -> _T:
        wire = self._take_idle() or await self._connect()
        while True:
            wire.begin()
            try:
                answer = await exchange(wire)
            except BaseException as error:
                wire.close()
                # A kept connection may have been closed by the store since; nothing was answered, so ask once more.
                stale = wire.calls > 1 and not wire.answered
                if not (isinstance(error, Miss) and error.reason is MissReason.UNREACHABLE and stale):
                    raise
            else:
                if self._closed:
                    wire.close()
                else:
                    self._idle.append(wire)
                return answer
            self._drop_idle()
            wire = await self._connect()

    async def _connect(self) -> AsyncWire:
        if self._closed:
            raise Miss(MissReason.UNREACHABLE, "the client is closed")
        wire = await open_wire(self._address, self._tls)
        if self._auth is not None:
            try:
                await wire.send([self._auth])
                await wire.status()
            except BaseException:
                wire.close()
                raise
        return wire

    def _take_idle(self) -> AsyncWire | None:
        while self._idle:
            wire = self._idle.pop()
            if wire.usable:
                return wire
            wire.close()  # gone, or with bytes that nobody asked for and that would be taken for the next replies
        return None

    def _drop_idle(self) -> None:
        for wire in self._idle:
            wire.close()
        self._idle.clear()

    def _count(self, operation: str, reasons: Iterable[MissReason | None]) -> None:
        for reason in reasons:
            key = (operation, "ok" if reason is None else reason.value)
            self._counts[key] = self._counts.get(key, 0) + 1
