"""Follows what one store node holds, by its feed ``KV.EVENTS``, and tells the index; `Holdings` adds the nodes up.

A chunk counts as long as any node has it on any tier. What the feed loses, it says (``gap``) and tells anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from kvhearth.router.feeds.ports import FeedState, Index
from kvhearth.store.client.async_exchanges import auth_command
from kvhearth.store.client.async_wire import AsyncWire, open_wire
from kvhearth.store.client.outcomes import Miss, MissReason
from kvhearth.store.client.wire import digits, encode_command
from kvhearth.store.protocol.address import parse_address
from kvhearth.store.protocol.packed import PackedKeysError, unpack_keys
from kvhearth.store.protocol.tls import ClientTls, TlsSettings

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 20.0
"""The feed pings every 5 s; so much silence says that the node is gone."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_MOST_FIELDS = 8
_KINDS = frozenset({b"snapshot", b"live", b"put", b"evict", b"clear", b"gap", b"ping"})
_MOST_KEY_BYTES = 8 * 2**20
_NAMESPACE_BYTES = 33  # 32 hex digits and a colon
_GROUP_BYTES = 4
_GROUP = bytes(_GROUP_BYTES)
"""Only the first KV cache group tells how far a prefix reaches; chunks of others are passed over."""


def chunk_hash(key: bytes) -> int | None:
    """The engine's hash, below 2**64, of the last block of the chunk under a store key; None = not one of the KV group
    that counts, or no chunk's key at all."""
    if len(key) <= _NAMESPACE_BYTES + _GROUP_BYTES or key[_NAMESPACE_BYTES - 1 : _NAMESPACE_BYTES] != b":":
        return None
    if key[-_GROUP_BYTES:] != _GROUP:
        return None
    return int.from_bytes(key[-8 - _GROUP_BYTES : -_GROUP_BYTES], "big")


class Holdings:
    """Where each chunk of a pool's store lies, over nodes and tiers, so that the last copy's end is known.

    Args:
        pool: its name in the index.
        index: to be told of first and last copies.
        most: chunks remembered; of more the index is not told.
    """

    def __init__(self, pool: str, index: Index, most: int = 4_000_000) -> None:
        self._pool, self._index, self._most = pool, index, most
        self._bits: dict[tuple[str, bytes], int] = {}
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def put(self, node: str, tier: bytes, hashes: Iterable[int]) -> None:
        """A node holds these on a tier."""
        bit = self._bits.setdefault((node, tier), 1 << len(self._bits))
        new = []
        for hash_ in hashes:
            held = self._places.get(hash_, 0)
            if not held and len(self._places) >= self._most:
                continue
            self._places[hash_] = held | bit
            if not held:
                new.append(hash_)
        if new:
            self._index.store_put(self._pool, new)

    def evict(self, node: str, tier: bytes, hashes: Iterable[int]) -> None:
        """A node no longer holds these on a tier."""
        bit = self._bits.get((node, tier), 0)
        gone = []
        for hash_ in hashes:
            held = self._places.get(hash_, 0)
            if not held & bit:
                continue
            if held == bit:
                del self._places[hash_]
                gone.append(hash_)
            else:
                self._places[hash_] = held ^ bit
        if gone:
            self._index.store_evicted(self._pool, gone)

    def clear(self, node: str, tier: bytes | None = None) -> None:
        """A node holds nothing, on a tier or on any."""
        for (name, letter), bit in self._bits.items():
            if name == node and tier in (None, letter):
                self.evict(node, letter, [hash_ for hash_, held in self._places.items() if held & bit])


class StoreFeed:
    """Tells what one node holds, until it is stopped.

    Args:
        address: ``host:port`` or ``unix:/path``.
        holdings: of the pool; to be told.
        user: for AUTH, with ``password``.
        password: None = no AUTH.
        tls: for TLS over TCP; None = none.
        now: seconds, never going back.

    Raises:
        UserError: not an address, or a TLS file cannot be used.
    """

    def __init__(
        self,
        address: str,
        holdings: Holdings,
        *,
        user: str = "default",
        password: str | None = None,
        tls: TlsSettings | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._parsed = parse_address(address)
        self._tls = ClientTls(tls) if tls is not None else None
        self._auth = auth_command(user, password)
        self._holdings = holdings
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self._position: tuple[bytes, int] | None = None
        self._complained = False
        self._boot = b""
        self.state = FeedState()

    def start(self) -> None:
        """Begin to follow."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End; what was told stays told."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._follow()
            except (Miss, TimeoutError, PackedKeysError) as error:
                if not self._complained:
                    log.warning("the events of store %s cannot be followed: %s", self.address, str(error) or "silent")
                    self._complained = True
            except Exception:
                log.exception("the events of store %s cannot be followed", self.address)
            if self.state.connected:
                self.state.connected = False
                pause = _FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if pause == _LONGEST_PAUSE_SECONDS:
                self._forget()  # away for long: what it held is not to be counted on

    async def _follow(self) -> None:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            wire = await open_wire(self._parsed, self._tls)
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                if self._auth is not None:
                    await wire.send([self._auth])
                    await wire.status()
                position = self._position
                start = [] if position is None else [b"FROM", position[0], b"%d" % position[1]]
                await wire.send([encode_command(b"KV.EVENTS", *start)])
            while True:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    message = await _message(wire)
                self._take(message)
        finally:
            wire.close()

    def _take(self, message: Sequence[bytes | int]) -> None:
        kind = message[0]
        if not isinstance(kind, bytes):
            raise Miss(MissReason.PROTOCOL, "an event without a name")
        if kind == b"hello":
            self._greeted(message)
            return
        sequence = message[1] if len(message) > 1 else None
        if not isinstance(sequence, int):
            raise Miss(MissReason.PROTOCOL, f"{kind!r} without a sequence")
        if kind == b"snapshot" and self._position is not None:
            self._forget()  # the store no longer knows what happened since: it tells all anew
        if kind in (b"put", b"snapshot"):
            self._holdings.put(self.address, *_chunks(message))
        elif kind == b"evict":
            self._holdings.evict(self.address, *_chunks(message))
        elif kind == b"clear":
            tier = message[2] if len(message) > 2 else None
            self._holdings.clear(self.address, tier if isinstance(tier, bytes) else None)
        elif kind == b"gap":
            self.state.healed["snapshot"] += 1
            self._forget()
        self.state.batches += 1
        if kind in _KINDS:
            self.state.events[kind.decode()] += 1
        else:
            self.state.ignored["unknown_event"] += 1
        if kind == b"live" or (self._position is not None and kind != b"gap"):
            boot = self._boot
            self._position = (boot, sequence)

    def _greeted(self, message: Sequence[bytes | int]) -> None:
        boot = message[1] if len(message) > 1 else b""
        self._boot = boot if isinstance(boot, bytes) else b""
        if self._position is not None and self._position[0] != self._boot:
            self._forget()
        if self._complained:
            log.info("the events of store %s are followed again", self.address)
            self._complained = False
        self.state.connected = True

    def _forget(self) -> None:
        self._position = None
        self._holdings.clear(self.address)


def _chunks(message: Sequence[bytes | int]) -> tuple[bytes, list[int]]:
    tier, keys = message[2:4] if len(message) > 3 else (None, None)
    if not isinstance(tier, bytes) or len(tier) != 1 or not isinstance(keys, bytes):
        raise Miss(MissReason.PROTOCOL, "an event without tier or keys")
    return tier, [hash_ for key in unpack_keys(keys) if (hash_ := chunk_hash(key)) is not None]


async def _message(wire: AsyncWire) -> list[bytes | int]:
    """One array of bulk strings and integers."""
    head = await wire.line()
    if head[:1] not in (b"*", b">") or not head[1:].isdigit() or not 2 <= int(head[1:]) <= _MOST_FIELDS:
        raise Miss(
            MissReason.REFUSED if head.startswith(b"-") else MissReason.PROTOCOL, head.decode("utf-8", "replace")
        )
    fields: list[bytes | int] = []
    for _ in range(int(head[1:])):
        line = await wire.line()
        if line.startswith(b":"):
            fields.append(digits(line))
            continue
        length = int(line[1:]) if line.startswith(b"$") and line[1:].isdigit() else -1
        if not 0 <= length <= _MOST_KEY_BYTES:
            raise Miss(MissReason.PROTOCOL, f"{line[:40]!r} in an event")
        value = bytearray(length)
        await wire.read_into([memoryview(value)])
        await wire.crlf()
        fields.append(bytes(value))
    return fields
