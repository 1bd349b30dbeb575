"""The router itself: listens, decides who answers a request, keeps the tables, and looks at the deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import signal
import time
from collections.abc import Callable, Sequence, Sized
from typing import cast

import msgspec

from kvhearth.errors import UserError
from kvhearth.metrics import Registry
from kvhearth.metrics.registry import CONTENT_TYPE
from kvhearth.router import replies
from kvhearth.router.body import BadBody, Routable, read_body
from kvhearth.router.client import ClientConnection, Request
from kvhearth.router.config import RouterConfig
from kvhearth.router.engines import Engine, Fleet
from kvhearth.router.exchange import Exchange
from kvhearth.router.headers import HeaderLines
from kvhearth.router.instruments import Instruments
from kvhearth.router.probe import Probe
from kvhearth.routing.hashing import content_seed, prefix_hashes
from kvhearth.routing.ports import RouteRequest
from kvhearth.routing.registry import make_policy

log = logging.getLogger(__name__)

FORWARDED = frozenset({b"/tokenize", b"/detokenize", b"/rerank", b"/score", b"/classify", b"/pooling"})
"""vLLM's POST routes outside ``/v1/`` that name a model. Its administrative routes are not forwarded."""

NOT_FORWARDED = frozenset({b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"})
"""They change the one engine that gets them; sent through a router they would leave engines unlike each other."""

LISTEN_BACKLOG = 4096


class _Refused(Exception):
    """The router answers this request itself, with an error. ``model`` is its label, "" when it is not a known one."""

    def __init__(self, reply: replies.Reply, model: str = "") -> None:
        self.reply = reply
        self.model = model
        super().__init__(reply.code)


class Router:
    """An OpenAI-compatible front door to several engines. One event loop owns all of it."""

    def __init__(self, config: RouterConfig, registry: Registry | None = None) -> None:
        self._config = config
        self.limits = config.limits
        self.timeouts = config.timeouts
        self.policy = make_policy(config.policy, config.prefix)
        self.fleet = Fleet(config.engines, self.policy.engine_gone)
        self._registry = registry or Registry()
        self.instruments = Instruments(self, self._registry)
        self.clients: set[ClientConnection] = set()
        self.exchanges: set[Exchange] = set()
        self.buffered_bytes = 0
        self.draining = False
        self._left = asyncio.Event()  # something has left a table; for `stop`
        self.loop = cast("asyncio.AbstractEventLoop", None)  # set by start
        self.now = time.monotonic
        self._server: asyncio.Server | None = None
        self._probes: list[asyncio.Task[None]] = []
        self._sweeping: asyncio.TimerHandle | None = None
        self._bearer = None if config.api_key is None else f"Bearer {config.api_key}".encode()
        self._pages = {b"/health": self._health, b"/metrics": self._metrics, b"/v1/models": self._models}

    # Life

    async def start(self) -> tuple[str, int]:
        """Probe every engine once, then listen. Engines that are down are no error: they may come.

        Returns:
            The address listened on.

        Raises:
            UserError: the address cannot be listened on.
        """
        self.loop = asyncio.get_running_loop()
        probes = [Probe(engine, self.fleet, self._config.health, self._config.api_key) for engine in self.fleet.engines]
        self._server = await self._listen()
        await asyncio.gather(*[probe.check() for probe in probes])
        self._probes = [self.loop.create_task(probe.watch()) for probe in probes]
        self._sweep()
        await self._server.start_serving()
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def _listen(self) -> asyncio.Server:
        host, port = self._config.listen_host, self._config.listen_port
        where = f"listen {host}:{port}"
        try:
            return await self.loop.create_server(
                lambda: ClientConnection(self), host, port, backlog=LISTEN_BACKLOG, start_serving=False
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError("the port is in use", where=where, remedy="stop who has it or use another") from None
            raise UserError(
                f"cannot listen ({error.strerror or error})", where=where, remedy="use an address of this machine"
            ) from None

    async def stop(self) -> None:
        """Take no new requests, let those in flight end within ``drain_seconds``, cut the rest, close everything."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for client in list(self.clients):
            client.close_if_idle()
        deadline = self.now() + self.timeouts.drain_seconds
        await self._until_empty(self.exchanges, deadline)
        for exchange in list(self.exchanges):
            exchange.cut()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for engine in self.fleet.engines:
            for connection in list(engine.connections):
                connection.close()
        for client in list(self.clients):
            client.close_if_idle()
        await self._until_empty(self.clients, self.now() + 1)
        for client in list(self.clients):
            client.abort()

    async def _until_empty(self, table: Sized, deadline: float) -> None:
        while table and self.now() < deadline:
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - self.now()):
                    await self._left.wait()

    async def serve(self, ready: Callable[[str, int], None]) -> None:
        """Start, call ``ready(host, port)``, run until SIGTERM or SIGINT, stop.

        Raises:
            UserError: the address cannot be listened on.
        """
        host, port = await self.start()
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, stopping.set)
        ready(host, port)
        await stopping.wait()
        await self.stop()

    def _sweep(self) -> None:
        """Look at every deadline. One timer for all, for a timer a request would cost more than the request."""
        now = self.now()
        for exchange in [exchange for exchange in self.exchanges if exchange.deadline < now]:
            exchange.expired()
        for client in [client for client in self.clients if client.deadline < now]:
            client.expired()
        for engine in self.fleet.engines:
            while engine.idle and engine.idle[0].idle_since + self.timeouts.engine_idle_seconds < now:
                engine.idle[0].close()
        self._sweeping = self.loop.call_later(self.timeouts.sweep_seconds, self._sweep)

    # From client connections

    def admit(self, client: ClientConnection) -> bool:
        """Take a new client connection into the table; False when there are too many."""
        self.clients.add(client)
        return len(self.clients) <= self.limits.max_connections

    def forget(self, client: ClientConnection) -> None:
        """The client's connection is gone."""
        self.clients.discard(client)
        self._left.set()

    def ended(self, exchange: Exchange) -> None:
        """The exchange is over: no table holds anything of it any more."""
        self.exchanges.discard(exchange)
        self._left.set()

    def refuse_head(self, request: Request, headers: HeaderLines) -> replies.Reply | None:
        """Why a request is refused before its body is read, or None."""
        if self._bearer is not None and request.path != b"/health":
            given = headers.first(b"authorization") or b""
            if not hmac.compare_digest(given, self._bearer):
                return replies.error(
                    401,
                    "this router wants its API key: send Authorization: Bearer <key>",
                    "invalid_api_key",
                    extra=b"www-authenticate: Bearer\r\n",
                )
        return self.refuse_body(int(headers.taken.get(b"content-length", b"0")), held=False)

    def refuse_body(self, nbytes: int, *, held: bool = True) -> replies.Reply | None:
        """Why a body of (so far, when ``held``) that many bytes is refused, or None."""
        limits = self.limits
        if nbytes > limits.max_body_bytes:
            return replies.error(413, f"the body exceeds {limits.max_body_bytes} bytes", "body_too_large")
        if self.buffered_bytes + (0 if held else nbytes) > limits.max_buffered_bytes:
            return replies.error(503, "too many bytes in flight", "overloaded", retry_after_seconds=1)
        return None

    def drop_body(self, request: Request) -> None:
        """The body is not needed any more: no retry can follow."""
        self.buffered_bytes -= len(request.body)
        request.body = b""

    def handle(self, client: ClientConnection, request: Request) -> Exchange | None:
        """Answer a complete request, or begin the exchange that will."""
        try:
            if request.method == b"POST" and self._is_forwarded(request.path):
                return self._forward(client, request)
            client.answer(self._page(request), request)
        except _Refused as refused:
            self.instruments.refused(refused.reply.code)
            self.instruments.answered(refused.model, "", refused.reply.status)
            client.answer(refused.reply, request)
        return None

    def pick(self, route: RouteRequest, *, excluding: Engine) -> Engine | None:
        """Another engine for a request whose first one failed; None when there is none."""
        serving = [engine for engine in self.fleet.serving(route.model) or () if engine is not excluding]
        return self._decide(route, self._with_room(serving))

    # Routing

    def _is_forwarded(self, path: bytes) -> bool:
        if path in FORWARDED:
            return True
        return path.startswith(b"/v1/") and path not in NOT_FORWARDED and path not in self._pages and b".." not in path

    def _forward(self, client: ClientConnection, request: Request) -> Exchange:
        if len(self.exchanges) >= self.limits.max_requests_in_flight:
            raise _Refused(replies.error(503, "too many requests in flight", "overloaded", retry_after_seconds=1))
        started = time.perf_counter()
        try:
            routable = read_body(request.body, request.content_type)
        except BadBody as bad:
            raise _Refused(replies.error(400, bad.message, "bad_body", param=bad.param)) from None
        model = self._only_model() if routable.model is None else routable.model
        serving = self._serving(model)
        route = self._route(model, routable)
        engine = self._decide(route, self._with_room(serving), started)
        if engine is None:
            code = "overloaded" if serving else "no_healthy_engine"
            message = "every engine with this model is full" if serving else "no healthy engine has this model"
            label = model if self.fleet.serving(model) is not None else ""
            raise _Refused(replies.error(503, message, code, retry_after_seconds=1), label)
        exchange = Exchange(self, client, request, route)
        self.exchanges.add(exchange)
        exchange.start(engine)
        return exchange

    def _only_model(self) -> str:
        models = self.fleet.models()
        if len(models) > 1:
            message = "name the model, for there is more than one"
            raise _Refused(replies.error(400, message, "model_missing", param="model"))
        return models[0] if models else ""

    def _serving(self, model: str) -> list[Engine]:
        serving = self.fleet.serving(model)
        if serving is not None:
            return serving
        if self.fleet.fully_known():
            raise _Refused(replies.error(404, f"the model {model!r} does not exist", "model_not_found", param="model"))
        return []

    def _route(self, model: str, routable: Routable) -> RouteRequest:
        hashes = prefix_hashes(routable.content, seed=content_seed(model, routable.salt))
        return RouteRequest(model, hashes, routable.tokens)

    def _with_room(self, engines: Sequence[Engine]) -> list[Engine]:
        most = self.limits.max_requests_per_engine
        return [engine for engine in engines if engine.requests_in_flight < most]

    def _decide(self, route: RouteRequest, engines: list[Engine], started: float | None = None) -> Engine | None:
        started = time.perf_counter() if started is None else started
        decision = self.policy.pick(route, [engine.view() for engine in engines])
        if decision.engine is None:
            return None
        pieces = len(route.prefix_hashes)
        self.instruments.decided(time.perf_counter() - started, decision.matched, pieces)
        return next(engine for engine in engines if engine.name == decision.engine)

    # Pages of the router's own

    def _page(self, request: Request) -> replies.Reply:
        page = self._pages.get(request.path)
        if page is not None and request.method in {b"GET", b"HEAD"}:
            return page()
        shown = request.path[:100].decode("ascii", "replace")
        if page is None and not self._is_forwarded(request.path):
            raise _Refused(replies.error(404, f"there is no route {shown}", "no_route"))
        allow = b"allow: POST\r\n" if page is None else b"allow: GET, HEAD\r\n"
        raise _Refused(replies.error(405, f"{shown} does not take this method", "bad_method", extra=allow))

    def _health(self) -> replies.Reply:
        if self.fleet.healthy() and not self.draining:
            return replies.Reply(200, b"")
        message = "the router is stopping" if self.draining else "no engine is healthy"
        return replies.error(503, message, "unhealthy", retry_after_seconds=1)

    def _metrics(self) -> replies.Reply:
        return replies.Reply(200, self._registry.expose(), content_type=CONTENT_TYPE.encode())

    def _models(self) -> replies.Reply:
        merged = {card["id"]: card for engine in reversed(self.fleet.engines) for card in engine.cards}
        cards = [merged[model] for model in sorted(merged)]
        return replies.Reply(200, msgspec.json.encode({"object": "list", "data": cards}))
