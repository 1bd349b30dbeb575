"""A client's connection: parses requests, hands them to the router one at a time and in order, writes the answers."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from kvhearth.router import replies
from kvhearth.router.headers import HeaderLines

if TYPE_CHECKING:
    from kvhearth.router.exchange import Exchange
    from kvhearth.router.router import Router
    from kvhearth.router.tenants import Tenant

NEVER = float("inf")
MAX_PIPELINED = 8
"""Requests read ahead while one is being answered; then the client is no longer read from."""
LINGER_SECONDS = 2.0
"""How long a client may go on sending what will not be read, so that it sees the refusal and not a reset."""
WRITE_HIGH_BYTES = 256 * 1024


class Request:
    """One request, complete or refused on the way (then ``refusal`` says how, and the connection ends after it)."""

    __slots__ = (
        "body",
        "content_type",
        "forwarded",
        "http10",
        "keep_alive",
        "method",
        "path",
        "rank",
        "refusal",
        "request_id",
        "session",
        "streams",
        "target",
        "tenant",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.path = b""
        self.http10 = False
        self.keep_alive = False
        self.content_type = b""
        self.forwarded = b""
        self.rank = b""
        self.request_id = b""
        self.session = b""
        self.streams = False
        self.body = b""
        self.tenant: Tenant | None = None
        self.refusal: replies.Reply | None = None

    def head_for(self, host: bytes, rank: int | None) -> bytes:
        """The head as sent to an engine, or to that data-parallel rank of it; the body always goes with its length.

        A client's own choice of rank counts only where the router has none to choose.
        """
        chosen = b"" if rank is None else b"%d" % rank
        if rank is None and self.rank:
            chosen = self.rank
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%bcontent-length: %d\r\n\r\n" % (
            self.method,
            self.target,
            host,
            self.forwarded,
            b"x-data-parallel-rank: %b\r\n" % chosen if chosen else b"",
            len(self.body),
        )


class ClientConnection(asyncio.Protocol):
    """One client. Requests wait in ``_queue`` for their turn; at most one is an exchange."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._headers = HeaderLines()
        self.on_header = self._headers.add  # the parser's callback, without a step between
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._queue: deque[Request] = deque()
        self._exchange: Exchange | None = None
        self._advancing = False
        self._reading_paused = False
        self._refused = False
        self._lingering = False
        self._closing = False
        self._lost = False
        self._continue_due = False
        self._taken = 0
        self.write_paused = False
        self.deadline = NEVER
        self._begin()

    def _begin(self) -> None:
        self._request = Request()
        self._headers.begin()
        self._in_message = False
        self._overhead_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._wait_for_request()
        if not self._router.admit(self):
            refusal = replies.error(503, "too many connections", "too_many_connections", retry_after_seconds=1)
            self._router.instruments.refused(refusal.code)
            self.answer(refusal, Request())
            self._close()

    def data_received(self, data: bytes) -> None:
        if self._refused or self._closing:
            return
        taken = self._taken
        self._parse(data)
        if self._taken != taken:
            self._overhead_bytes = 0
        elif self._in_message:
            # Of a head, of chunk sizes or of trailers: none of it is body, yet the parser holds a whole line of it.
            self._overhead_bytes += len(data)
            if self._overhead_bytes > self._router.limits.max_head_bytes:
                self._refuse(replies.error(431, "the request's headers are too long", "headers_too_long"))
        if self._queue and self._exchange is None:
            self._advance()
        if len(self._queue) >= MAX_PIPELINED and not (self._reading_paused or self._closing or self._lost):
            self._reading_paused = True
            self._transport.pause_reading()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._refused:
                    data = self._without_upgrade() + data[upgrade.args[0] :]
                    self._parser = httptools.HttpRequestParser(self)
                    continue
            except httptools.HttpParserError as error:
                self._refuse(replies.error(400, f"this is not HTTP/1.1: {error}", "bad_http"))
            return

    def _without_upgrade(self) -> bytes:
        """The head just parsed, less its offer to change protocols (h2c, from Java's client).

        The parser takes what follows such a head for the other protocol. The offer is declined by serving HTTP/1.1.
        """
        request, headers = self._request, self._headers
        framing = (b"content-length", b"transfer-encoding", b"expect")
        lines = [b"%b: %b\r\n" % (name, headers.taken[name]) for name in framing if name in headers.taken]
        lines.append(b"connection: %b\r\n" % (b"keep-alive" if request.keep_alive else b"close"))
        version = b"1.0" if request.http10 else b"1.1"
        return b"%b %b HTTP/%b\r\n%b%b\r\n" % (
            request.method,
            request.target,
            version,
            headers.forwarded(),
            b"".join(lines),
        )

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._router.forget(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()
        self._router.buffered_bytes -= self._body_bytes + sum(len(request.body) for request in self._queue)
        self._queue.clear()
        self._begin()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._exchange is not None:
            self._exchange.resume()
        else:
            self._advance()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._refused:
            return
        self._begin()
        self._in_message = True
        if self._exchange is None:
            self.deadline = self._router.now() + self._router.timeouts.request_seconds

    def on_url(self, url: bytes) -> None:
        self._request.target += url

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        self._headers.end()
        request, headers, parser = self._request, self._headers, self._parser
        request.method = parser.get_method()
        if not request.target.startswith(b"/"):
            request.target = _origin_form(request.target)
        request.path = request.target.partition(b"?")[0]
        request.http10 = parser.get_http_version() == "1.0"
        request.keep_alive = parser.should_keep_alive()
        request.content_type = headers.first(b"content-type") or b""
        request.rank = headers.taken.get(b"x-data-parallel-rank", b"")
        request.request_id = headers.first(b"x-request-id") or b""
        if self._router.session_header:
            request.session = headers.first(self._router.session_header) or b""
        request.forwarded = headers.forwarded()
        refusal = self._router.refuse_head(request, headers)
        if refusal is None and headers.taken.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            refusal = replies.error(400, "the only transfer coding that is read is chunked", "bad_http")
        if request.method == b"CONNECT":
            refusal = replies.error(
                405, "this router opens no tunnels", "bad_method", extra=b"allow: GET, HEAD, POST\r\n"
            )
        if refusal is not None:
            self._refuse(refusal)
        elif headers.taken.get(b"expect", b"").lower() == b"100-continue" and not parser.should_upgrade():
            self._continue_due = True
            if self._exchange is None and not self._queue:
                self._send_continue()

    def on_body(self, data: bytes) -> None:
        if self._refused:
            return
        self._taken += 1
        self._body_bytes += len(data)
        self._router.buffered_bytes += len(data)
        self._body.append(data)
        refusal = self._router.refuse_body(self._body_bytes)
        if refusal is not None:
            self._refuse(refusal)

    def on_message_complete(self) -> None:
        if self._refused or self._parser.should_upgrade():
            return
        request = self._request
        self._taken += 1
        self._in_message = False
        self._continue_due = False
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._body_bytes = 0
        self._queue.append(request)

    # Turns

    def _advance(self) -> None:
        """Take the requests that are complete, in order, until one has to be waited for or others want their turn."""
        if self._advancing:
            return
        self._advancing = True
        taken = 0
        while self._queue and self._exchange is None and not (self.write_paused or self._closing or self._lost):
            taken += 1
            if taken > MAX_PIPELINED:
                self._router.loop.call_soon(self._advance)
                break
            request = self._queue.popleft()
            if request.refusal is not None:
                self.answer(request.refusal, request)
                self._linger()
            else:
                self.deadline = NEVER
                self._exchange = self._router.handle(self, request)
                if self._exchange is None:
                    self._router.drop_body(request)
                    if not request.keep_alive:
                        self._close()
        self._advancing = False
        if self._exchange is None and not (self._closing or self._lost or self._lingering):
            if self._reading_paused and not self._queue:
                self._reading_paused = False
                self._transport.resume_reading()
            if self._continue_due and not self._queue:
                self._send_continue()
            self._wait_for_request()

    def exchange_done(self, *, keep_alive: bool) -> None:
        """The exchange has ended and its last byte is written."""
        self._exchange = None
        if not keep_alive:
            self._close()
        elif not self._advancing:
            if self._queue or self._reading_paused or self._continue_due:
                self._advance()
            else:
                self._wait_for_request()

    def answer(self, reply: replies.Reply, request: Request) -> None:
        """Write a reply of the router's own."""
        keep_alive = request.keep_alive and request.refusal is None
        head = replies.head(reply, keep_alive=keep_alive, http10=request.http10)
        self.write(head if request.method == b"HEAD" else head + reply.body)

    def write(self, data: bytes) -> None:
        if not self._lost and data:
            self._transport.write(data)

    def cut(self, *, framed: bool) -> None:
        """End the connection in the middle of a response, so that the client cannot take it for complete.

        A framed response (with a length, or chunked) is visibly short. One that ends with its connection is not, so
        that connection is reset.
        """
        self._exchange = None
        if self.write_paused:
            self.abort()
        elif not framed:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.abort()
        else:
            self._close()

    def abort(self) -> None:
        """Drop the connection with whatever is still to be written."""
        self._closing = True
        self.deadline = NEVER
        self._transport.abort()

    def expired(self) -> None:
        """A deadline has passed: for a request, between requests, for lingering, or for taking the last answer."""
        if self._closing or self.write_paused:
            self.abort()
        elif self._in_message and not self._lingering:
            self._refuse(replies.error(408, "the request did not arrive in time", "request_timeout"))
            self._advance()
        else:
            self._close()

    def close_if_idle(self) -> None:
        """The router stops: leave unless a request is being answered."""
        if self._exchange is None:
            self._close()

    def _refuse(self, refusal: replies.Reply) -> None:
        """Answer with ``refusal`` when its turn comes and end the connection, for what follows cannot be read."""
        if self._refused:
            return
        self._refused = True
        if not self._in_message:
            self._begin()  # what was parsed last is complete and waits for its own answer
        self._router.instruments.refused(refusal.code)
        self._router.buffered_bytes -= self._body_bytes
        self._body = []
        self._body_bytes = 0
        self._continue_due = False
        self._request.refusal = refusal
        self._queue.append(self._request)

    def _send_continue(self) -> None:
        self._continue_due = False
        self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _wait_for_request(self) -> None:
        timeouts = self._router.timeouts
        wait = timeouts.request_seconds if self._in_message else timeouts.client_idle_seconds
        self.deadline = self._router.now() + wait

    def _linger(self) -> None:
        self._lingering = True
        self.deadline = self._router.now() + LINGER_SECONDS
        if self._transport.can_write_eof():
            self._transport.write_eof()
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()

    def _close(self) -> None:
        self._closing = True
        self.deadline = self._router.now() + self._router.timeouts.idle_seconds
        self._transport.close()


def _origin_form(target: bytes) -> bytes:
    """The path of a target that names this server too, as a client does that takes it for a proxy (RFC 9112, 3.2.2)."""
    scheme, slashes, rest = target.partition(b"://")
    if not slashes or scheme.lower() not in {b"http", b"https"}:
        return target
    ends = [at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0]
    path = rest[min(ends, default=len(rest)) :]
    return path if path.startswith(b"/") else b"/" + path
