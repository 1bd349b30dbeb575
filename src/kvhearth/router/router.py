"""The router itself: listens, decides who answers a request, keeps the tables, and looks at the deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import signal
import time
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, cast
from urllib.parse import parse_qs, unquote, unquote_to_bytes

import msgspec

from kvhearth.errors import UserError
from kvhearth.metrics import Registry
from kvhearth.metrics.registry import CONTENT_TYPE
from kvhearth.router import replies
from kvhearth.router.client import ClientConnection, Request
from kvhearth.router.config import RouterConfig
from kvhearth.router.decisions import DecisionLog
from kvhearth.router.dispatch import Dispatcher
from kvhearth.router.engines import Fleet
from kvhearth.router.exchange import Exchange
from kvhearth.router.headers import HeaderLines
from kvhearth.router.instruments import Instruments
from kvhearth.router.models import model_cards
from kvhearth.router.probe import LoadProbe, Probe
from kvhearth.router.replies import Refused
from kvhearth.routing.policies.kv_aware import KvAware
from kvhearth.routing.policies.session import Session
from kvhearth.routing.ports import Policy
from kvhearth.routing.registry import make_policy

if TYPE_CHECKING:
    from kvhearth.router.kv import KvRouting

log = logging.getLogger(__name__)

FORWARDED = frozenset(
    {b"/tokenize", b"/detokenize", b"/rerank", b"/score", b"/classify", b"/pooling"}
    | {b"/v1/completions", b"/v1/chat/completions"}  # as every other path below /v1/, but known at once
)
"""vLLM's POST routes outside ``/v1/`` that name a model. Its administrative routes are not forwarded."""

NOT_FORWARDED = frozenset({b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"})
"""They change the one engine that gets them; sent through a router they would leave engines unlike each other."""

LISTEN_BACKLOG = 4096


class Router:
    """An OpenAI-compatible front door to several engines. One event loop owns all of it."""

    def __init__(self, config: RouterConfig, registry: Registry | None = None) -> None:
        self._config = config
        self.limits = config.limits
        self.timeouts = config.timeouts
        self.now = time.monotonic
        self._registry = registry or Registry()
        self.kv = _kv_routing(config, self._registry) if config.policy_name == KvAware.name else None
        self.policy: Policy = make_policy(config.policy_name, config.prefix) if self.kv is None else self.kv.policy
        self.fleet = Fleet(config.engines, self._target_gone, config.data_parallel)
        self.instruments = Instruments(self, self._registry)
        self._decisions = DecisionLog(config.decisions_kept, self.policy)
        self.dispatcher = Dispatcher(self, self.policy, self.kv, config.aliases, self._decisions)
        self.session_header = config.session_header.lower().encode() if config.policy_name == Session.name else b""
        self.clients: set[ClientConnection] = set()
        self.exchanges: set[Exchange] = set()
        self.buffered_bytes = 0
        self.draining = False
        self._left = asyncio.Event()  # something has left a table; for `stop`
        self.loop = cast("asyncio.AbstractEventLoop", None)  # set by start
        self._server: asyncio.Server | None = None
        self._probes: list[asyncio.Task[None]] = []
        self._sweeping: asyncio.TimerHandle | None = None
        self._bearer = None if config.api_key is None else f"Bearer {config.api_key}".encode()
        self._pages: dict[bytes, Callable[[Request], replies.Reply]] = {
            b"/health": self._health,
            b"/metrics": self._metrics,
            b"/v1/models": self._models,
            b"/debug/decision": self._explained,
        }

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
        watches = [probe.watch() for probe in probes]
        if self.kv is not None:
            await self.kv.start(self.fleet)
            failed = self.instruments.load_report_failed
            key, checks = self._config.api_key, self._config.health
            watches += [LoadProbe(engine, checks, key, failed).watch() for engine in self.fleet.engines]
        self._probes = [self.loop.create_task(watch) for watch in watches]
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
        if self.kv is not None:
            await self.kv.stop()
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
        self._sweeping = self.loop.call_later(self.timeouts.sweep_seconds, self._sweep)
        now = self.now()
        for exchange in [exchange for exchange in self.exchanges if exchange.deadline < now]:
            exchange.expired()
        for client in [client for client in self.clients if client.deadline < now]:
            client.expired()
        if self.kv is not None:
            self.kv.sweep(self.fleet, self.exchanges, now)
        for engine in self.fleet.engines:
            while engine.idle and engine.idle[0].idle_since + self.timeouts.engine_idle_seconds < now:
                engine.idle[0].close()

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
                return self.dispatcher.forward(client, request)
            client.answer(self._page(request), request)
        except Refused as refused:
            self._refuse(client, request, refused)
        except Exception:
            log.exception("a request to %s could not be handled", request.path[:100].decode("latin-1"))
            self._refuse(client, request, Refused(replies.failed()))
        return None

    def _refuse(self, client: ClientConnection, request: Request, refused: Refused) -> None:
        self.instruments.refused(refused.reply.code)
        self.instruments.answered(refused.model, "", refused.reply.status)
        client.answer(refused.reply, request)

    def _is_forwarded(self, path: bytes) -> bool:
        if path in FORWARDED:
            return True
        if b"%" in path:
            path = unquote_to_bytes(path)  # as the engine will
        return (
            path.startswith(b"/v1/")
            and path.rstrip(b"/") not in NOT_FORWARDED
            and path not in self._pages
            and not path.startswith(b"/v1/models/")
            and b".." not in path
        )

    # Pages of the router's own

    def _page(self, request: Request) -> replies.Reply:
        page = self._pages.get(request.path)
        if page is None and request.path.startswith(b"/v1/models/"):
            page = self._model
        if page is not None and request.method in {b"GET", b"HEAD"}:
            return page(request)
        shown = request.path[:100].decode("ascii", "replace")
        if page is None and not self._is_forwarded(request.path):
            raise Refused(replies.error(404, f"there is no route {shown}", "no_route"))
        allow = b"allow: POST\r\n" if page is None else b"allow: GET, HEAD\r\n"
        raise Refused(replies.error(405, f"{shown} does not take this method", "bad_method", extra=allow))

    def _health(self, request: Request) -> replies.Reply:
        if self.fleet.healthy() and not self.draining:
            return replies.Reply(200, b"")
        message = "the router is stopping" if self.draining else "no engine is healthy"
        return replies.error(503, message, "unhealthy", retry_after_seconds=1)

    def _metrics(self, request: Request) -> replies.Reply:
        return replies.Reply(200, self._registry.expose(), content_type=CONTENT_TYPE.encode())

    def _models(self, request: Request) -> replies.Reply:
        cards = model_cards(self.fleet.engines, self._config.aliases)
        return replies.Reply(200, msgspec.json.encode({"object": "list", "data": cards}))

    def _model(self, request: Request) -> replies.Reply:
        wanted = unquote(request.path.removeprefix(b"/v1/models/").decode("latin-1"))
        for card in model_cards(self.fleet.engines, self._config.aliases):
            if card["id"] == wanted:
                return replies.Reply(200, msgspec.json.encode(card))
        raise Refused(replies.error(404, f"the model {wanted!r} does not exist", "model_not_found", param="model"))

    def _explained(self, request: Request) -> replies.Reply:
        query = parse_qs(request.target.partition(b"?")[2].decode("latin-1"))
        if "id" in query:
            found = self._decisions.find(query["id"][-1])
            if not found:
                message = "no decision of that id is kept any more: the last ones are at /debug/decision"
                raise Refused(replies.error(404, message, "no_decision", param="id"))
        else:
            found = self._decisions.last(_count(query.get("last", ["10"])[-1]))
        return replies.Reply(200, msgspec.json.encode({"decisions": found}))

    def _target_gone(self, target: str) -> None:
        self.policy.engine_gone(target)
        if self.kv is not None:
            self.kv.target_gone(target)
        for exchange in list(self.exchanges):
            exchange.target_gone(target)


def _kv_routing(config: RouterConfig, registry: Registry) -> KvRouting:
    from kvhearth.router.kv import KvRouting  # brings ZeroMQ and the tokenizers, which the other policies do without

    return KvRouting(config, registry)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise Refused(replies.error(400, f"last={text[:20]!r} is not a number", "bad_query", param="last"))
    return int(text)
