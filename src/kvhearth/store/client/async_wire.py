"""The asyncio client's end of one connection: sends commands, and receives values straight into the caller's memory.

Deadlines are the caller's (`asyncio.timeout`): a method that is cancelled leaves the connection unusable, and `close`
then lets go of the caller's memory at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from kvhearth.store.client.outcomes import Miss, MissReason
from kvhearth.store.client.wire import digits, unexpected
from kvhearth.store.protocol.address import Address
from kvhearth.store.protocol.resp import skip_bytes
from kvhearth.store.protocol.tls import ClientTls

_BUFFER_BYTES = 4096
# What the kernel does not take at once, asyncio may copy: so no more than this a time.
_SEND_BYTES = 256 * 1024
_SCRATCH_BYTES = 64 * 1024


class AsyncWire(asyncio.BufferedProtocol):
    """One connection, from `open_wire`. Methods raise `Miss` (unreachable, protocol) and then it is unusable."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._targets: list[memoryview] = []
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._paused_writing = False
        self._paused_reading = False
        self._lost: str | None = None
        self.calls = 0
        self.answered = False
        """Whether any byte came back since `begin`."""

    def begin(self) -> None:
        """Start a call on this connection."""
        self.calls += 1
        self.answered = False

    @property
    def usable(self) -> bool:
        """Whether it stands, and nothing has been received beyond the replies that were read."""
        return self._lost is None and self._start == self._end

    def close(self) -> None:
        """Drop the connection and what is still to be sent; from here on nothing is written to a caller's memory."""
        self._targets = []
        self._lost = self._lost or "closed"
        if self._transport is not None:
            self._transport.abort()

    async def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send all ``pieces``. They must stay as they are until the reply has come or the connection is closed."""
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _SEND_BYTES):
                if self._lost is not None or self._transport is None:
                    raise Miss(MissReason.UNREACHABLE, f"sending: {self._lost}")
                self._transport.write(view[start : start + _SEND_BYTES])
                if self._paused_writing:
                    self._room = self._loop.create_future()
                    await self._room

    async def line(self) -> bytes:
        """The next line of a reply, without its CRLF."""
        while True:
            at = self._buffer.find(b"\r\n", self._start, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            if self._end - self._start == _BUFFER_BYTES:
                raise Miss(MissReason.PROTOCOL, f"a reply line of more than {_BUFFER_BYTES} bytes")
            await self._more()

    async def status(self) -> None:
        """Expect ``+…``."""
        line = await self.line()
        if not line.startswith(b"+"):
            raise unexpected(line)

    async def integer(self) -> int:
        """Expect ``:n``."""
        line = await self.line()
        if not line.startswith(b":"):
            raise unexpected(line)
        return digits(line)

    async def bulk_length(self) -> int | None:
        """Expect ``$n``; None for an absent value. The bytes and a CRLF follow."""
        line = await self.line()
        if not line.startswith(b"$"):
            raise unexpected(line)
        return None if line == b"$-1" else digits(line)

    async def bulk(self, limit: int) -> bytes:
        """Expect a value of at most ``limit`` bytes, whole; empty for an absent one."""
        length = await self.bulk_length()
        if length is None:
            return b""
        if length > limit:
            raise Miss(MissReason.PROTOCOL, f"an answer of {length} bytes")
        value = bytearray(length)
        await self.read_into([memoryview(value)])
        await self.crlf()
        return bytes(value)

    async def read_into(self, views: Sequence[memoryview]) -> None:
        """Fill ``views`` in order, received straight into them but for what came along with the last line."""
        left: list[memoryview] = []
        for view in views:
            taken = min(len(view), self._end - self._start)
            view[:taken] = self._view[self._start : self._start + taken]
            self._start += taken
            if taken < len(view):
                left.append(view[taken:])
        if left:
            self._targets = left
            await self._more()

    async def skip(self, nbytes: int) -> None:
        """Read ``nbytes`` and drop them."""
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            await self.read_into([part])
            nbytes -= len(part)

    async def crlf(self) -> None:
        """Expect the CRLF that ends a bulk."""
        if await self.line():
            raise Miss(MissReason.PROTOCOL, "a value is longer than announced")

    async def _more(self) -> None:
        """Wait until the targets are full or, where there are none, for any byte."""
        if self._lost is not None:
            raise Miss(MissReason.UNREACHABLE, f"receiving: {self._lost}")
        self._make_room()
        self._arrival = self._loop.create_future()
        await self._arrival

    def _make_room(self) -> None:
        waiting = bytes(self._view[self._start : self._end])
        self._view[: len(waiting)] = waiting
        self._start, self._end = 0, len(waiting)
        if self._paused_reading and self._transport is not None:
            self._paused_reading = False
            self._transport.resume_reading()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._lost or (str(exc) if exc else "closed by the store")
        for future in (self._arrival, self._room):
            if future is not None and not future.done():
                future.set_exception(Miss(MissReason.UNREACHABLE, self._lost))
        self._targets = []

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._targets[0] if self._targets else self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.answered = True
        if self._targets:
            self._targets = skip_bytes(self._targets, nbytes)
        else:
            self._end += nbytes
        if self._targets:
            return
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        if self._end == _BUFFER_BYTES and self._transport is not None:  # nobody reads: let it wait in the kernel
            self._paused_reading = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._paused_writing = True

    def resume_writing(self) -> None:
        self._paused_writing = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


async def open_wire(address: Address, tls: ClientTls | None) -> AsyncWire:
    """Connect; over TLS where ``tls`` is given and the address is no unix socket.

    Raises:
        Miss: unreachable.
    """
    loop = asyncio.get_running_loop()
    try:
        if address.is_unix:
            return (await loop.create_unix_connection(AsyncWire, address.path))[1]
        context = tls.context() if tls is not None else None
        name = tls.server_name(address.host) if tls is not None else None
        made = await loop.create_connection(AsyncWire, address.host, address.port, ssl=context, server_hostname=name)
        return made[1]
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be one
        reason = getattr(error, "strerror", None) or error
        raise Miss(MissReason.UNREACHABLE, f"{address}: {reason}") from None
