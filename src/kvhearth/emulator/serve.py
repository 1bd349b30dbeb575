"""Runs one emulated engine: socket, event loop, HTTP server, store threads; from ready to clean end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
import uvloop
from starlette.types import ASGIApp

from kvhearth.emulator.announcer import Announcer
from kvhearth.emulator.answers import Hashing
from kvhearth.emulator.app import build_app
from kvhearth.emulator.clock import EmulatedClock
from kvhearth.emulator.config import EmulatorConfig, Shape, shape_of
from kvhearth.emulator.exposition import Exposition, JobMetrics, RankExposition, RequestMetrics
from kvhearth.emulator.faults import Faults
from kvhearth.emulator.loop import EngineLoop
from kvhearth.emulator.publisher import EventPublisher
from kvhearth.emulator.ranks import Ranks
from kvhearth.emulator.store_io import StoreIo
from kvhearth.emulator.transfers import EngineTransfers
from kvhearth.engine import EngineModel
from kvhearth.errors import UserError
from kvhearth.metrics import Registry

_BACKLOG = 2048
_GRACE_SECONDS = 2

_SWITCH_SECONDS = 0.0005


class Emulator:
    """An emulated engine with its HTTP server.

    Construction checks everything and takes the port; `run` serves until `stop` (from any thread) or a signal.

    Raises:
        UserError: a setting that cannot work, or a port that is taken.
    """

    def __init__(self, config: EmulatorConfig) -> None:
        self.config = config
        self.shape = shape_of(config)
        self._socket = _listen(config.host, config.port)
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until told to stop. SIGINT and SIGTERM stop it when this is the main thread.

        Args:
            on_ready: called once requests are answered.

        Raises:
            UserError: an endpoint for KV events cannot be had.
        """
        # The engine loop computes nearly all the time; by default each return of a store thread's call would wait 5 ms.
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            uvloop.run(self._serve(on_ready))
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End `run`: open streams get two seconds."""
        if self._server is not None:
            self._server.should_exit = True

    async def _serve(self, on_ready: Callable[[], None] | None) -> None:
        async with _engine(self.config, self.shape) as (app, ranks):
            settings = uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_GRACE_SECONDS + 1,
            )
            self._server = _Server(settings, ranks, on_ready)
            await self._server.serve(sockets=[self._socket])


class _Server(uvicorn.Server):
    def __init__(self, settings: uvicorn.Config, ranks: Ranks, on_ready: Callable[[], None] | None) -> None:
        super().__init__(settings)
        self._ranks = ranks
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let open calls end, for a while; then end them."""
        late = asyncio.get_running_loop().call_later(
            _GRACE_SECONDS, self._ranks.fail_all, "the server is shutting down"
        )
        await super().shutdown(sockets)
        late.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM are an orderly end, of which nothing remains to be raised again; a second one hurries."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _engine(config: EmulatorConfig, shape: Shape) -> AsyncIterator[tuple[ASGIApp, Ranks]]:
    """The engine loops, running, and the app in front of them."""
    registry = Registry()
    faults = Faults()
    clock = EmulatedClock(config.time_scale)
    async with contextlib.AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(_rank(config, shape, number, clock, registry, faults))
            for number in range(config.data_parallel_size)
        ]
        ranks = Ranks([loop for loop, _ in made])
        exposition = Exposition([shown for _, shown in made], faults)
        registry.collect_from(exposition.families)
        app = build_app(
            ranks,
            shape.limits,
            registry,
            exposition,
            faults,
            stream_interval=config.stream_interval,
            api_key=config.api_key,
        )
        yield app, ranks


@contextlib.asynccontextmanager
async def _rank(
    config: EmulatorConfig, shape: Shape, number: int, clock: EmulatedClock, registry: Registry, faults: Faults
) -> AsyncIterator[tuple[EngineLoop, RankExposition]]:
    """One data-parallel rank, running, and what shows it."""
    name, model_name = config.rank_name(number), shape.limits.name
    events = config.publishes_events
    publisher = None if events is None else EventPublisher(events, number, config.host, faults)
    announcer = None
    if publisher is not None:
        announcer = Announcer(
            config.block_size, config.blocks_per_chunk, self_describing=config.self_describing_kv_events
        )
    store = _store(config, shape, clock)
    jobs = JobMetrics(registry, model_name, name)

    def make() -> tuple[EngineModel, EngineTransfers]:
        model = EngineModel(shape.engine, shape.cost, tell_events=publisher is not None)
        return model, EngineTransfers(shape.links(config.store_link), store, jobs.done)

    loop = EngineLoop(
        make,
        Hashing(config.block_size, shape.hasher, keep_tokens=publisher is not None),
        clock,
        RequestMetrics(registry, model_name, name),
        announcer=announcer,
        publisher=publisher,
    )
    shown = RankExposition(loop, store, model_name=model_name, engine=name, store_bytes_scale=config.store_bytes_scale)
    running = asyncio.create_task(loop.run())
    try:
        yield loop, shown
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        if publisher is not None:
            await publisher.close()
        if store is not None:
            store.close()  # waits for a call under way, at most its deadline; nothing else is left to run


def _store(config: EmulatorConfig, shape: Shape, clock: EmulatedClock) -> StoreIo | None:
    if config.store is None:
        return None
    return StoreIo(
        config.store,
        config.store_password,
        namespace=shape.namespace,
        payload_bytes=shape.payload_bytes,
        deadline_seconds=config.store_deadline_seconds,
        now_ns=clock.now_ns,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise UserError(f"{host}: {error.strerror}", where="host", remedy="give an address of this machine") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"{host}:{port} is already in use",
                where="port",
                remedy="stop the process that has it or choose another",
            ) from None
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}", where="host", remedy="give an address of this machine"
        ) from None
    return sock
