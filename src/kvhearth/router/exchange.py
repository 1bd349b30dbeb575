"""One request on its way through: which engine, which attempt, how far the response has come. Lives until its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from kvhearth.router import replies
from kvhearth.router.upstream import UpstreamConnection
from kvhearth.router.usage import read_usage
from kvhearth.routing.ports import RouteRequest

if TYPE_CHECKING:
    from kvhearth.router.client import ClientConnection, Request
    from kvhearth.router.decisions import Choice
    from kvhearth.router.engines import Engine, Target
    from kvhearth.router.router import Router
    from kvhearth.router.tenants import Tenant
    from kvhearth.router.waiting import Ticket

NEVER = float("inf")
CLIENT_GONE = 499
CUT = 0

TRIED_AGAIN = frozenset({502, 503})
"""Statuses with which an engine, or what stands before it, says that it did nothing with a request."""

NOT_THE_ENGINE = frozenset({"client_stalled", "engine_down"})
"""Reasons of failure that its breaker does not count: the client's, and what health checks have seen already."""


class Exchange:
    """A request that an engine is to answer.

    It ends exactly once: finished, answered with an error, cut, or cancelled because the client left. Until then it is
    in ``router.exchanges`` and, while it has a target, in that one's load; before that it may wait for one.
    """

    __slots__ = (
        "_before",
        "_choice",
        "_chunked",
        "_client",
        "_first_at",
        "_framed",
        "_fresh_tried",
        "_head",
        "_head_sent",
        "_last",
        "_pieces_seen",
        "_prefill_tokens",
        "_request",
        "_route",
        "_router",
        "_sent_at",
        "_stage",
        "_started",
        "_status",
        "_streamed",
        "_target",
        "_task",
        "_tenant",
        "_ticket",
        "_tokens",
        "_tried",
        "_upstream",
        "deadline",
        "keep_alive",
        "prefill_ends",
    )

    def __init__(self, router: Router, client: ClientConnection, request: Request, route: RouteRequest) -> None:
        self._router = router
        self._client = client
        self._request = request
        self._route = route
        self._started = router.now()
        self._choice: Choice | None = None
        self._target: Target | None = None
        self._upstream: UpstreamConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._ticket: Ticket | None = None
        self._tenant: Tenant | None = None
        self._fresh_tried = False
        self._tried: list[Engine] = []
        self._stage = "connect"
        self._status = 0
        self._head = b""
        self._head_sent = False
        self._chunked = False
        self._framed = True
        self._streamed = False
        self._pieces_seen = 0
        self._tokens = 0
        self._before = self._last = b""
        self._sent_at = self._started
        self._first_at = 0.0
        self._prefill_tokens = 0
        self.prefill_ends = NEVER
        self.deadline = NEVER
        self.keep_alive = request.keep_alive

    @property
    def request(self) -> Request:
        return self._request

    @property
    def route(self) -> RouteRequest:
        return self._route

    @property
    def _engine_name(self) -> str:
        return self._choice.target.name if self._choice is not None else ""

    def charge(self, tenant: Tenant) -> None:
        """The tenant has been charged for it, and is to be told of its end."""
        self._tenant = tenant

    def wait_for(self, routed: Coroutine[None, None, None]) -> None:
        """``routed`` will call `start`, `queue` or `refuse`, when what routing needs is there; it ends by itself."""
        self._task = self._router.loop.create_task(routed)

    def queue(self, route: RouteRequest, ticket: Ticket) -> None:
        """It has a place in the waiting room; `start` or `refuse` is called when its turn has come, or will not."""
        self._task = None
        self._route = route
        self._ticket = ticket

    def start(self, route: RouteRequest, choice: Choice) -> None:
        """Send the request to the target chosen; called again for a retry on another one."""
        self.take(route, choice)
        self.send()

    def take(self, route: RouteRequest, choice: Choice) -> None:
        """The target chosen is its own from now on, and counts it as load; `send` is to follow."""
        self._task = None
        if self._ticket is not None:
            self._ticket = None
            self._router.instruments.seated(route.model, self._router.now() - self._started)
        self._route = route
        self._choice = choice
        target = self._target = choice.target
        self._tried.append(target.engine)
        self._prefill_tokens = choice.prefill_tokens
        target.load(route.prompt_tokens, choice.prefill_tokens)
        if choice.prefill_seconds:
            self.prefill_ends = self._router.now() + choice.prefill_seconds

    def send(self) -> None:
        """Send the request to its target, over a connection that is open or one that must be opened."""
        self._task = None
        target = self._target
        assert target is not None  # noqa: S101 - set by take, for the type checker
        engine = target.engine
        while engine.idle:
            connection = engine.idle.pop()
            if connection.usable:
                self._send(connection)
                return
        self._connect(target)

    def refuse(self, reply: replies.Reply) -> None:
        """There is no engine for it."""
        self._task = None
        self._ticket = None
        self._answer(reply)

    def prefilled(self) -> None:
        """Its prompt is computed, or so it must be assumed."""
        self.prefill_ends = NEVER
        if self._prefill_tokens and self._target is not None:
            self._target.prefilled(self._prefill_tokens)
            self._prefill_tokens = 0

    def _connect(self, target: Target) -> None:
        self._stage = "connect"
        self.deadline = self._router.now() + self._router.timeouts.connect_seconds
        self._task = self._router.loop.create_task(self._open(target))

    async def _open(self, target: Target) -> None:
        router, engine = self._router, target.engine
        connection = UpstreamConnection(engine, router.limits.max_head_bytes, router.limits.max_idle_per_engine)
        try:
            await router.loop.create_connection(lambda: connection, engine.host, engine.port, ssl=engine.ssl)
        except asyncio.CancelledError:
            connection.abort()  # it may have opened just now
            raise
        except (OSError, UnicodeError) as error:
            self._task = None
            if isinstance(error, ConnectionRefusedError):  # nobody listens; other errors may be of our own making
                router.fleet.mark_down(engine, "connection refused", unreachable=True)
            self.upstream_failed("connect_failed")
            return
        self._task = None
        self._send(connection)

    def _send(self, connection: UpstreamConnection) -> None:
        target = self._target
        assert target is not None  # noqa: S101 - set by start, for the type checker
        self._upstream = connection
        self._stage = "first_byte"
        self._sent_at = now = self._router.now()
        self.deadline = now + self._router.timeouts.first_byte_seconds
        connection.send(self, self._request.head_for(target.engine.host_header, target.rank), self._request.body)
        if self._client.write_paused:
            connection.pause_reading()

    # From the upstream connection

    def on_head(self, status: int, reason: bytes, lines: bytes, length: bytes | None, *, has_body: bool) -> None:
        """The response's head is there; the next `flush` writes it."""
        choice = self._choice
        assert choice is not None  # noqa: S101
        engine = choice.target.engine
        if status >= 500 or not engine.breaker.clean:
            self._router.fleet.answered(engine, status, self._router.now())
        if status in TRIED_AGAIN and self._turn_to_another(f"status_{status}"):
            return
        framing = b""
        if length is not None:
            framing = b"content-length: %b\r\n" % length
        elif has_body and not self._request.http10:
            self._chunked = True
            framing = b"transfer-encoding: chunked\r\n"
        elif has_body:
            self._framed = False
            self.keep_alive = False
        connection = b""
        if self._router.draining or not self.keep_alive:
            self.keep_alive = False
            connection = b"connection: close\r\n"
        elif self._request.http10:
            connection = b"connection: keep-alive\r\n"
        self._status = status
        self._streamed = b"text/event-stream" in lines
        self._head = b"HTTP/1.1 %d %b\r\n%bserver: %b\r\n%b%b%b\r\n" % (
            status,
            reason,
            lines,
            replies.SERVER,
            choice.header_lines,
            framing,
            connection,
        )
        self._stage = "idle"

    def flush(self, pieces: list[bytes], *, complete: bool) -> None:
        """Write to the client what has arrived, in one piece, and end the exchange when the response is complete.

        Args:
            pieces: of the response's body, since the last call; taken out of the list.
            complete: there is nothing more to come.
        """
        now = self._router.now()
        out = self._head
        if out:
            self._head = b""
            self._head_sent = True
            self._router.drop_body(self._request)
        if pieces:
            if not self._pieces_seen:
                self._first_byte(now)
            self._pieces_seen += 1
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._before, self._last = self._last, body  # where usage will be, when it comes
            out += b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else body
        if complete:
            if self._chunked:
                out += b"0\r\n\r\n"
            self._client.write(out)
            self._finish(now)
            return
        self.deadline = now + self._router.timeouts.idle_seconds
        self._client.write(out)

    def _first_byte(self, now: float) -> None:
        assert self._choice is not None  # noqa: S101
        self._first_at = now
        if self._prefill_tokens:
            self.prefilled()
        self._router.instruments.first_byte(self._route.model, now - self._started)
        if self._streamed and self._status == 200 and self._choice.decision.predicted_seconds:
            self._router.dispatcher.observed(self._route, self._choice, now - self._sent_at)

    def upstream_failed(self, reason: str, *, stale: bool = False) -> None:
        """The attempt is lost. Try again if no byte has reached the client, else cut the client's connection.

        Args:
            reason: label of the failure metric.
            stale: the connection had been used before and was closed without a single byte of response.
        """
        target = self._target
        assert target is not None  # noqa: S101
        self._upstream = None
        if stale and not self._fresh_tried:
            self._fresh_tried = True
            self._router.instruments.retried("stale_connection")
            self._connect(target)
            return
        self._router.instruments.upstream_failed(target.name, reason)
        if reason not in NOT_THE_ENGINE:
            self._router.fleet.failed(target.engine, self._router.now())
        if self._head_sent:
            self._unload()
            self._end(CUT, target.name)
            self._client.cut(framed=self._framed)
            return
        if reason != "first_byte_timeout" and self._turn_to_another(None):
            return
        self._unload()
        self.keep_alive = self._request.keep_alive
        self._answer(_failure(reason, target.name))

    def _turn_to_another(self, failure: str | None) -> bool:
        """Send the request to another engine, if there is one and it may be tried again.

        Args:
            failure: counted as the reason why the present attempt is given up; None where that was done.
        """
        router, target = self._router, self._target
        assert target is not None  # noqa: S101
        if len(self._tried) >= router.max_attempts or router.retries.saved < 1:
            return False
        other = router.dispatcher.pick_other(self._route, self._request, excluding=self._tried)
        if other is None:
            return False
        router.retries.take()
        if failure is not None:
            router.instruments.upstream_failed(target.name, failure)
        router.instruments.retried("other_engine")
        self._drop_attempt()
        self._head = b""
        self._chunked = False
        self._framed = True
        self.keep_alive = self._request.keep_alive
        self.start(self._route, other)
        return True

    # From the client connection and the router

    def target_lost(self, target: Target) -> None:
        """It does not answer its health checks any more: a first byte is not waited for there."""
        if self._target is not target or self._head_sent or (self._upstream is None and self._task is None):
            return
        self._detach()
        self.upstream_failed("engine_down")

    def client_gone(self) -> None:
        """The client left: stop the engine's work on this at once."""
        self._router.instruments.client_disconnects += 1
        self._drop_attempt()
        self._end(CLIENT_GONE, self._engine_name)

    def pause(self) -> None:
        """The client does not keep up: stop reading from the engine."""
        if self._upstream is not None:
            self._upstream.pause_reading()

    def resume(self) -> None:
        """The client has caught up."""
        if self._upstream is not None:
            self._upstream.resume_reading()

    def expired(self) -> None:
        """The deadline of the present stage has passed."""
        reason = f"{self._stage}_timeout"
        if self._stage == "idle" and self._client.write_paused:
            reason = "client_stalled"
        self._detach()
        self.upstream_failed(reason)

    def cut(self) -> None:
        """The router stops and cannot wait: drop both sides."""
        self._drop_attempt()
        self._end(CUT, self._engine_name)
        self._client.cut(framed=self._framed)

    def _finish(self, now: float) -> None:
        upstream, target = self._upstream, self._target
        assert upstream is not None and target is not None  # noqa: S101, PT018
        self._upstream = None
        upstream.release(now)
        self._unload()
        self._measure(now)
        self._end(self._status, target.name)
        self._client.exchange_done(keep_alive=self.keep_alive and not self._router.draining)

    def _measure(self, now: float) -> None:
        instruments, model = self._router.instruments, self._route.model
        instruments.finished(model, now - self._started)
        usage = read_usage(self._before, self._last) if self._status == 200 else None
        if usage is not None:
            instruments.used(model, usage)
            self._tokens = usage.completion
        elif self._streamed:
            # Without usage the pieces stand for tokens: engines send one or a few tokens in each.
            self._tokens = self._pieces_seen
        if self._streamed and self._tokens > 1:
            instruments.inter_token(model, (now - self._first_at) / (self._tokens - 1))

    def _answer(self, reply: replies.Reply) -> None:
        self._router.instruments.refused(reply.code)
        self._end(reply.status, "")
        self._client.answer(reply, self._request)
        self._client.exchange_done(keep_alive=self.keep_alive)

    def _end(self, status: int, engine: str) -> None:
        self.deadline = NEVER
        self._router.drop_body(self._request)
        self._router.ended(self)
        if self._tenant is not None:
            self._tenant.ended(self._router.now(), self._tokens or (self._pieces_seen if self._streamed else 0))
        self._router.instruments.answered(self._route.model, engine, status)

    def _drop_attempt(self) -> None:
        self._detach()
        self._unload()

    def _detach(self) -> None:
        if self._ticket is not None:
            self._router.waiting.remove(self._ticket)
            self._router.instruments.queued("left")
            self._ticket = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    def _unload(self) -> None:
        target = self._target
        if target is not None:
            target.unload(self._route.prompt_tokens, self._prefill_tokens)
            self._target = None
            self._prefill_tokens = 0
            self.prefill_ends = NEVER
            if self._router.waiting:
                self._router.room_made()


def _failure(reason: str, engine: str) -> replies.Reply:
    if reason in {"connect_failed", "connect_timeout", "engine_down"}:
        return replies.error(
            503, f"engine {engine} cannot be reached and no other serves this model", reason, retry_after_seconds=1
        )
    if reason == "first_byte_timeout":
        return replies.error(504, f"engine {engine} did not begin to answer in time", reason)
    return replies.error(502, f"engine {engine} closed the connection or broke HTTP before its response", reason)
