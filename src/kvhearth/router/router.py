"""The router itself: listens, keeps the tables, looks at the deadlines, and follows its fleet and its configuration."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote_to_bytes

from kvhearth.errors import UserError
from kvhearth.metrics import MetricFamily, Registry
from kvhearth.router import replies
from kvhearth.router.access import Access
from kvhearth.router.client import ClientConnection, Request
from kvhearth.router.config import RouterConfig
from kvhearth.router.decisions import DecisionLog
from kvhearth.router.discovery.discovery import Discovery
from kvhearth.router.discovery.member import Member
from kvhearth.router.dispatch import Dispatcher
from kvhearth.router.engines import Engine, Target
from kvhearth.router.exchange import Exchange
from kvhearth.router.fleet import Fleet
from kvhearth.router.headers import HeaderLines
from kvhearth.router.instruments import Instruments
from kvhearth.router.operator import OperatorPages
from kvhearth.router.pages import Pages
from kvhearth.router.prefill import PrefillFirst
from kvhearth.router.reload import Reloader
from kvhearth.router.replies import Refused
from kvhearth.router.retries import RetryBudget
from kvhearth.router.tenants import Tenants
from kvhearth.router.tls import engines_tls, listener_tls
from kvhearth.router.waiting import WaitingRoom
from kvhearth.router.watches import Watches
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

LOOK_SECONDS = 1.0
"""How often files are looked at for changes."""


class Router:
    """An OpenAI-compatible front door to several engines. One event loop owns all of it."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry | None = None,
        *,
        reread: Callable[[], RouterConfig] | None = None,
        config_file: Path | None = None,
    ) -> None:
        self.now = time.monotonic
        self.registry = registry or Registry()
        self._obey(config)
        self.tenants = None
        if config.tenants_file is not None:
            self.tenants = Tenants(config.tenants_file, config.salt_secret, self.now)
            self.registry.collect_from(self.tenants.metrics)
        self.kv = _kv_routing(config, self.registry) if config.policy_name == KvAware.name else None
        self.policy: Policy = make_policy(config.policy_name, config.prefix) if self.kv is None else self.kv.policy
        self.retries = RetryBudget(config.resilience)
        self.prefill = PrefillFirst(self, self.registry)
        self.waiting = WaitingRoom(config.queue.max_waiting_requests)
        self._tls = listener_tls(config.tls)
        self._watches: Watches | None = None
        self.fleet = Fleet(config.limits, config.resilience, self, config.models, engines_tls(config.tls))
        self.instruments = Instruments(self, self.registry)
        decisions = DecisionLog(config.decisions_kept, self.policy)
        self.dispatcher = Dispatcher(self, self.policy, self.kv, decisions)
        self.clients: set[ClientConnection] = set()
        self.exchanges: set[Exchange] = set()
        self.buffered_bytes = 0
        self.draining = False
        self._left = asyncio.Event()  # something has left a table; for `stop`
        self.loop = cast("asyncio.AbstractEventLoop", None)  # set by start
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._seating = False
        self._refreshing = False
        self._ending: set[asyncio.Task[None]] = set()
        self._next_look = 0.0
        self._access = Access(config, self.tenants)
        self._pages = Pages(self, decisions)
        self._operators = OperatorPages(self.fleet)
        self.discovery = Discovery(config.discovery, static_members(config))
        self.reloader = Reloader(config_file, reread or (lambda: config), self.reconfigure, config)
        self._reloading: asyncio.Task[None] | None = None
        self.registry.collect_from(self._discovery_metrics)
        self.fleet.update(self.discovery.members)

    def _discovery_metrics(self) -> Iterable[MetricFamily]:
        return self.discovery.metrics()  # of the one that is in force by now

    def _obey(self, config: RouterConfig) -> None:
        self.config = config
        self.limits = config.limits
        self.timeouts = config.timeouts
        self.queue = config.queue
        self.max_attempts = config.resilience.max_attempts
        self.session_header = config.session_header.lower().encode() if config.policy_name == Session.name else b""

    # Life

    async def start(self) -> tuple[str, int]:
        """Find the engines and probe each once, then listen. Engines that are down are no error: they may come.

        Returns:
            The address listened on.

        Raises:
            UserError: the address cannot be listened on.
        """
        self.loop = asyncio.get_running_loop()
        self._server = await self._listen()
        watches = self._watches = Watches(self.fleet, self.instruments, self.config)
        if self.kv is not None:
            await self.kv.start(self.fleet)
        first = [watches.add(engine) for engine in self.fleet.engines]
        await self._discover()
        await asyncio.gather(*first, *[watches.first(engine) for engine in self.fleet.engines])
        self._sweep()
        self._reloading = self.loop.create_task(self.reloader.watch())
        await self._server.start_serving()
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def _discover(self) -> None:
        self.fleet.complete = self.discovery.complete
        await self.discovery.start(self._discovered)

    def _discovered(self, members: Sequence[Member]) -> None:
        self.fleet.complete = self.discovery.complete
        self.fleet.update(members)

    async def reconfigure(self, config: RouterConfig) -> None:
        """Obey another configuration from now on; requests in flight go on. What needs a restart must not differ."""
        before, self.config = self.config, config
        self._obey(config)
        self.retries.follow(config.resilience)
        self.waiting.most_requests = config.queue.max_waiting_requests
        self.fleet.follow(config.limits, config.resilience, config.models)
        if config.discovery != before.discovery:
            await self.discovery.stop()
            self.discovery = Discovery(config.discovery, static_members(config))
            self.fleet.update(self.discovery.members)
            await self._discover()
        else:
            self.discovery.name(static_members(config))
        if self._watches is not None:
            await self._watches.follow(config)

    async def _listen(self) -> asyncio.Server:
        host, port = self.config.listen_host, self.config.listen_port
        where = f"listen {host}:{port}"
        try:
            return await self.loop.create_server(
                lambda: ClientConnection(self),
                host,
                port,
                backlog=LISTEN_BACKLOG,
                start_serving=False,
                ssl=None if self._tls is None else self._tls.context,
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
        if self._reloading is not None:
            self._reloading.cancel()
            await asyncio.gather(self._reloading, return_exceptions=True)
        await self.discovery.stop()
        if self._watches is not None:
            await self._watches.stop()
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self.kv is not None:
            await self.kv.stop()
        for engine in (*self.fleet.engines, *self.fleet.leaving):
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
        self.loop.add_signal_handler(signal.SIGHUP, self.reloader.ask)
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
        if self.waiting:
            self.dispatcher.too_late(now)
        if self.kv is not None:
            self.kv.sweep(self.fleet, self.exchanges, now)
        self.fleet.sweep(now)
        self._farewell()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look_at_files()
        for engine in (*self.fleet.engines, *self.fleet.leaving):
            while engine.idle and engine.idle[0].idle_since + self.timeouts.engine_idle_seconds < now:
                engine.idle[0].close()

    def _look_at_files(self) -> None:
        if self.tenants is not None and not self._refreshing:
            self._refreshing = True
            self._end(self._refresh(self.tenants))
        if self._tls is not None:
            try:
                if self._tls.refresh():
                    log.info("the certificate was renewed")
            except UserError as error:
                log.warning("the certificate stays the old one: %s", error)

    async def _refresh(self, tenants: Tenants) -> None:
        try:
            await tenants.refresh()
        finally:
            self._refreshing = False

    def _farewell(self) -> None:
        """Engines that have left and ended what they had are looked at no more."""
        for engine in self.fleet.gone():
            if self._watches is not None:
                self._end(self._watches.end(engine))

    def _end(self, ending: Coroutine[None, None, None]) -> None:
        task = self.loop.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # From the fleet

    def engine_came(self, engine: Engine) -> None:
        """See `Watcher`."""
        if self._watches is None:
            return  # not started yet
        self._watches.add(engine)
        if self.kv is not None:
            self.kv.engine_came(engine)

    def engine_left(self, engine: Engine) -> None:
        """See `Watcher`."""
        for target in engine.targets:
            self.policy.engine_gone(target.name)
        if self.kv is not None and self._watches is not None:
            self._end(self.kv.engine_left(engine))

    def target_lost(self, target: Target) -> None:
        """See `Watcher`."""
        if self.fleet.targets.get(target.name) is target:
            self.policy.engine_gone(target.name)
            if self.kv is not None:
                self.kv.target_gone(target.name)
        for exchange in list(self.exchanges):
            exchange.target_lost(target)

    def room_made(self) -> None:
        """An engine can take another request: those who wait get it at the end of this turn of the loop."""
        if self.waiting and not self._seating:
            self._seating = True
            self.loop.call_soon(self._seat)

    def _seat(self) -> None:
        self._seating = False
        self.dispatcher.seat()

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
        refusal = self._access.refuse(request, headers)
        if refusal is not None:
            return refusal
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
            if self._access.is_operators(request.path):
                client.answer(self._operators.page(request), request)
                return None
            client.answer(self._pages.page(request, is_forwarded=self._is_forwarded(request.path)), request)
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
            and b".." not in path
        )


def static_members(config: RouterConfig) -> list[Member]:
    """The engines that are named in the configuration."""
    return [
        Member(
            name,
            url,
            ranks=config.data_parallel.get(name, 1),
            role=config.roles.get(name, "both"),
            events=config.kv.events.get(name),
        )
        for name, url in config.engines
    ]


def _kv_routing(config: RouterConfig, registry: Registry) -> KvRouting:
    from kvhearth.router.kv import KvRouting  # brings ZeroMQ and the tokenizers, which the other policies do without

    return KvRouting(config, registry)
