"""A connection to an engine: sends a request, parses the response, and is reused. Decides nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, cast

import httptools

from kvhearth.router.headers import HeaderLines

if TYPE_CHECKING:
    from kvhearth.router.engines import Engine

JOIN_BYTES = 64 * 1024
"""Up to here copying a body behind its head is cheaper than a second write."""

_CONTROLS = bytes([*range(9), *range(10, 32), 127])

_NO_BODY = frozenset({204, 304})


class Receiver(Protocol):
    """Who is told of the response to what it sent: an exchange, or a question of the router's own."""

    def on_head(self, status: int, reason: bytes, headers: bytes, length: bytes | None, *, has_body: bool) -> None: ...
    def flush(self, pieces: list[bytes], *, complete: bool) -> None: ...
    def upstream_failed(self, reason: str, *, stale: bool = False) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection, used by one exchange at a time.

    While ``exchange`` is None the connection is idle; whatever arrives then was not asked for, and ends it.
    """

    def __init__(self, engine: Engine, max_head_bytes: int, max_idle: int) -> None:
        self._engine = engine
        self._max_head_bytes = max_head_bytes
        self._max_idle = max_idle
        self._headers = HeaderLines()
        self._pieces: list[bytes] = []
        # The parser's callbacks, without a step between.
        self.on_header = self._headers.add
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.exchange: Receiver | None = None
        self.idle_since = 0.0
        self.used = False
        self.got_bytes = False
        self._reset()

    def _reset(self) -> None:
        self._headers.begin()
        self._pieces.clear()
        self._sound_pieces = 0
        self._reason = b""
        self._overhead_bytes = 0
        self._head_done = False
        self._interim = False
        self._until_close = False
        self._keep_alive = False
        self._complete = False
        self._surplus = False

    def send(self, exchange: Receiver, head: bytes, body: bytes) -> None:
        """Send a request on this idle connection and report its response to ``exchange``."""
        self.exchange = exchange
        self.got_bytes = False
        self._reset()
        if len(body) <= JOIN_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def release(self, now: float) -> None:
        """The exchange is over: keep the connection if it is clean and there is room, else close it."""
        self.exchange = None
        self.used = True
        clean = self._complete and self._keep_alive and not self._surplus and not self._until_close
        if not clean or self._transport.is_closing() or self._transport.get_write_buffer_size():
            self._transport.abort()
        elif len(self._engine.idle) >= self._max_idle:
            self._transport.close()
        else:
            self._transport.resume_reading()
            self.idle_since = now
            self._engine.idle.append(self)

    def abort(self) -> None:
        """The exchange gives up: the engine sees its client leave at once."""
        self.exchange = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close an idle connection."""
        if self in self._engine.idle:
            self._engine.idle.remove(self)
        self._transport.close()

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._engine.connections.add(self)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self.close()
            return
        self.got_bytes = True
        sound = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            sound = False
        if self.exchange is not exchange:
            return  # the status was enough: it has turned to another engine
        if not sound:
            if not self._complete:
                self._protocol_error(exchange)
                return
            self._surplus = True  # the response is sound; what follows it is not
        pieces = self._pieces
        if self._surplus:
            del pieces[self._sound_pieces :]
        if pieces or self._complete:
            self._overhead_bytes = 0
        else:
            # Of a head, of chunk sizes or of trailers: none of it is body, yet the parser holds a whole line of it.
            self._overhead_bytes += len(data)
            if self._overhead_bytes > self._max_head_bytes:
                self._protocol_error(exchange)
                return
        if self._head_done:
            exchange.flush(pieces, complete=self._complete)

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.connections.discard(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            if self in self._engine.idle:
                self._engine.idle.remove(self)
        elif self._until_close and exc is None:
            self.exchange = exchange
            exchange.flush(self._pieces, complete=True)
        else:
            exchange.upstream_failed("closed", stale=self.used and not self.got_bytes)

    def _protocol_error(self, exchange: Receiver) -> None:
        self.abort()
        exchange.upstream_failed("protocol")

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_headers_complete(self) -> None:
        if self._surplus or self.exchange is None:
            return
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ValueError(f"there is no status {status}")
        if status < 200:
            self._interim = True
            return
        self._head_done = True
        self._headers.end()
        self._keep_alive = self._parser.should_keep_alive()
        taken: dict[bytes, Any] = self._headers.taken
        length = taken.get(b"content-length")
        coding = taken.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            raise ValueError(f"transfer-encoding {coding!r} cannot be forwarded")
        self._until_close = length is None and coding is None and status not in _NO_BODY
        reason = self._reason.translate(None, _CONTROLS)  # the parser takes any byte there
        self.exchange.on_head(status, reason, self._headers.forwarded(), length, has_body=status not in _NO_BODY)

    def on_message_complete(self) -> None:
        if self._interim:
            self._reset()
        elif not self._surplus:
            self._complete = True
            self._sound_pieces = len(self._pieces)
