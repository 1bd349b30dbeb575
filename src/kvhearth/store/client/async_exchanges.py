"""What an asyncio client says and hears on one connection for each kind of call: no connecting, no retries, no
deadlines. Every function raises `Miss` when the call cannot go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvhearth.store.client.async_wire import AsyncWire
from kvhearth.store.client.outcomes import GetResult, Miss, MissReason, PutResult
from kvhearth.store.client.rows import is_unwell, set_pieces, verified
from kvhearth.store.client.wire import encode_command
from kvhearth.store.protocol.header import HEADER_BYTES
from kvhearth.store.protocol.limits import DEFAULT_USER
from kvhearth.store.protocol.packed import pack_keys

_T = TypeVar("_T")

_WINDOW = 64
_ASK_KEYS = 1024
_DRAM = b"d"
ABSENT = b"-"
_MAX_INFO_BYTES = 2**20


async def get_rows(
    wire: AsyncWire, keys: Sequence[bytes], views: Sequence[memoryview], results: list[GetResult]
) -> None:
    """GETs in windows of a pipeline, each row into its view; results as they come. Corrupt rows are deleted."""
    corrupt: list[bytes] = []
    for start in range(0, len(keys), _WINDOW):
        window = keys[start : start + _WINDOW]
        await wire.send([b"".join([encode_command(b"GET", key) for key in window])])
        for key in window:
            result = await _read_row(wire, key, views[len(results)])
            results.append(result)
            if result.reason is MissReason.CHECKSUM:
                corrupt.append(key)
    if corrupt:
        try:
            await delete(wire, corrupt)
        except Miss as miss:
            if miss.reason is not MissReason.REFUSED or is_unwell(miss):
                raise  # but who may only read leaves it to others


async def put_rows(
    wire: AsyncWire,
    keys: Sequence[bytes],
    headers: Sequence[bytes],
    rows: Sequence[memoryview],
    results: list[PutResult],
) -> None:
    """SETs in windows of a pipeline; results as they come."""
    for start in range(0, len(keys), _WINDOW):
        stop = min(start + _WINDOW, len(keys))
        for index in range(start, stop):
            await wire.send(set_pieces(keys[index], headers[index], rows[index]))
        for _ in range(start, stop):
            results.append(await _read_stored(wire))  # noqa: PERF401 - those that came count when the next does not


async def delete(wire: AsyncWire, keys: Sequence[bytes]) -> None:
    """DEL."""
    for start in range(0, len(keys), _ASK_KEYS):
        await wire.send([encode_command(b"DEL", *keys[start : start + _ASK_KEYS])])
        await wire.integer()


async def ping(wire: AsyncWire) -> None:
    """PING."""
    await wire.send([encode_command(b"PING")])
    await wire.status()


async def info(wire: AsyncWire) -> str:
    """INFO's text."""
    await wire.send([encode_command(b"INFO")])
    return (await wire.bulk(_MAX_INFO_BYTES)).decode("utf-8", "backslashreplace")


def auth_command(user: str, password: str | None) -> bytes | None:
    """AUTH for these; None for none."""
    if password is None:
        return None
    # A Redis of before version 6 knows no users.
    return encode_command(b"AUTH", *([] if user == DEFAULT_USER else [user.encode()]), password.encode())


async def _read_stored(wire: AsyncWire) -> PutResult:
    try:
        await wire.status()
    except Miss as miss:
        if miss.reason not in (MissReason.REFUSED, MissReason.TOO_LARGE) or is_unwell(miss):
            raise
        return PutResult(miss.reason)
    return PutResult(None)


async def _read_row(wire: AsyncWire, key: bytes, buffer: memoryview) -> GetResult:
    try:
        length = await wire.bulk_length()
    except Miss as miss:
        if miss.reason is not MissReason.REFUSED or is_unwell(miss):
            raise
        return GetResult(miss.reason)  # an error in place of this value; the rest of the pipeline stands
    if length is None:
        return GetResult(MissReason.ABSENT)
    nbytes = length - HEADER_BYTES
    if not 0 <= nbytes <= len(buffer):
        await wire.skip(length)
        await wire.crlf()
        return GetResult(MissReason.HEADER if nbytes < 0 else MissReason.TOO_LARGE)
    raw = bytearray(HEADER_BYTES)
    await wire.read_into([memoryview(raw), buffer[:nbytes]])
    await wire.crlf()
    return verified(raw, key, buffer[:nbytes])


class Questions:
    """What is asked about many keys at once, in our own commands or, where the store is a Redis, in Redis's. Remembers
    which it is."""

    def __init__(self) -> None:
        self._knows_ours = True

    async def leading(self, wire: AsyncWire, keys: Sequence[bytes]) -> bytes:
        """The tier of each leading key that is there, a letter each."""
        letters = b""
        for start in range(0, len(keys), _ASK_KEYS):
            part = keys[start : start + _ASK_KEYS]
            found = await self._ours(wire, b"KV.MATCH", part, _read_letters)
            letters += found if found is not None else (await _exists_one_by_one(wire, part)).partition(ABSENT)[0]
            if len(letters) < start + len(part):
                break
        return letters

    async def where(self, wire: AsyncWire, keys: Sequence[bytes]) -> bytes:
        """The tier of each key, a letter each; ``-`` for none."""
        letters = b""
        for start in range(0, len(keys), _ASK_KEYS):
            part = keys[start : start + _ASK_KEYS]
            found = await self._ours(wire, b"KV.EXISTS", part, _read_letters)
            letters += await _exists_one_by_one(wire, part) if found is None else found
            if len(letters) != start + len(part):
                raise Miss(MissReason.PROTOCOL, f"{len(letters) - start} answers for {len(part)} keys")
        return letters

    async def prefetch(self, wire: AsyncWire, keys: Sequence[bytes]) -> int:
        """How many of ``keys`` are in the store's DRAM or on their way; 0 where it does not know the command."""
        number = 0
        for start in range(0, len(keys), _ASK_KEYS):
            number += await self._ours(wire, b"KV.PREFETCH", keys[start : start + _ASK_KEYS], _read_number) or 0
        return number

    async def _ours(
        self,
        wire: AsyncWire,
        command: bytes,
        keys: Sequence[bytes],
        read: Callable[[AsyncWire, int], Awaitable[_T]],
    ) -> _T | None:
        """The answer to one of our commands; None when the store does not know it."""
        if not self._knows_ours:
            return None
        packed = pack_keys(keys)
        await wire.send([encode_command(command, *([packed] if packed is not None else keys))])
        try:
            return await read(wire, len(keys))
        except Miss as miss:
            if not miss.detail.startswith("ERR unknown command"):
                raise
            self._knows_ours = False
            return None


async def _read_letters(wire: AsyncWire, keys: int) -> bytes:
    return await wire.bulk(keys)


async def _read_number(wire: AsyncWire, keys: int) -> int:
    number = await wire.integer()
    if number > keys:
        raise Miss(MissReason.PROTOCOL, f"{number} of {keys} keys")
    return number


async def _exists_one_by_one(wire: AsyncWire, keys: Sequence[bytes]) -> bytes:
    await wire.send([b"".join([encode_command(b"EXISTS", key) for key in keys])])
    return b"".join([_DRAM if await wire.integer() > 0 else ABSENT for _ in keys])
