"""Real engines to stand behind the router: HTTP servers that do as a test says and keep every byte they got."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest
import uvloop

from kvhearth.metrics import parse_exposition
from kvhearth.router.config import HealthChecks, RouterConfig, Timeouts
from kvhearth.router.router import Router

DEADLINE_SECONDS = 10.0


class Received(NamedTuple):
    """A request as it reached an engine."""

    head: bytes
    body: bytes

    @property
    def target(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def lines(self) -> list[tuple[str, str]]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return [tuple(line.split(": ", 1)) for line in lines if line]

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.lines if key.lower() == name]


Behave = Callable[["ScriptedEngine", Received, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ScriptedEngine:
    """An engine whose answers a test writes. ``behave`` answers POSTs; health and models are knobs."""

    def __init__(self, lab: Lab, models: tuple[str, ...] = ("m",)) -> None:
        self.lab = lab
        self.models = models
        self.health_status = 200
        self.health_delay_seconds = 0.0
        self.page = b""
        self.behave: Behave = reply()
        self.requests: list[Received] = []
        self.probes = 0
        self.probe_heads: list[bytes] = []
        self.serving = 0
        self.disconnects = 0
        self.connections = 0
        self.writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.server: asyncio.Server | None = None
        self.gate: asyncio.Semaphore | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.lab.engines_loop.run(self._start())

    async def _start(self) -> None:
        self.gate = asyncio.Semaphore(0)
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 26)
        self.port = self.server.sockets[0].getsockname()[1]

    def die(self) -> None:
        """As a killed process: the port refuses, every connection is reset."""
        self.lab.engines_loop.run(self._die())

    async def _die(self) -> None:
        self.server.close()
        self.drop_connections()
        await asyncio.sleep(0)

    def drop_connections(self) -> None:
        for writer in list(self.writers):
            writer.transport.abort()

    def let_go(self, pieces: int = 1) -> None:
        """Let a gated answer send that many more pieces."""
        for _ in range(pieces):
            self.lab.engines_loop.loop.call_soon_threadsafe(self.gate.release)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    if not head.startswith(b"GET "):
                        break_after = await self._post(head, reader, writer)
                        if break_after:
                            break
                        continue
                    await self._get(head, writer)
        finally:
            self.writers.discard(writer)
            writer.transport.abort()

    async def _get(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        self.probes += 1
        self.probe_heads.append(head)
        status, body = self.health_status, b""
        await asyncio.sleep(self.health_delay_seconds)
        if b" /v1/models " in head:
            status, body = 200, json.dumps({"object": "list", "data": [{"id": m} for m in self.models]}).encode()
        elif b" /metrics " in head:
            body = self.page
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()

    async def _post(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        received = Received(head[:-4], b"")
        body = await reader.readexactly(int(received.header("content-length")[0]))
        received = Received(head[:-4], body)
        self.requests.append(received)
        self.serving += 1
        try:
            await self.behave(self, received, reader, writer)
        except (ConnectionError, EOFError):
            self.disconnects += 1
            return True
        finally:
            self.serving -= 1
        return writer.transport.is_closing()


async def client_left(reader: asyncio.StreamReader) -> None:
    """Ends with EOFError when the other side closes."""
    await reader.read(1)
    raise EOFError


async def unless_client_leaves(reader: asyncio.StreamReader, waited: Awaitable[object]) -> None:
    left, task = asyncio.ensure_future(client_left(reader)), asyncio.ensure_future(waited)
    done, _ = await asyncio.wait({left, task}, return_when=asyncio.FIRST_COMPLETED)
    if left in done:
        task.cancel()
        left.result()
    left.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await left


def reply(
    status: int = 200, body: bytes = b'{"ok":true}', headers: bytes = b"content-type: application/json\r\n"
) -> Behave:
    """Answer with a Content-Length."""

    async def behave(engine, received, reader, writer):
        writer.write(b"HTTP/1.1 %d Fine\r\n%bcontent-length: %d\r\n\r\n" % (status, headers, len(body)))
        writer.write(body)
        await writer.drain()

    return behave


def raw(*pieces: bytes, then_close: bool = False) -> Behave:
    """Answer with exactly these bytes, piece by piece."""

    async def behave(engine, received, reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        if then_close:
            writer.close()

    return behave


def events(pieces: list[bytes], *, gated: bool = False, die: bool = False) -> Behave:
    """Stream chunks; when gated, each waits for ``let_go``; with die, reset instead of ending."""

    async def behave(engine, received, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            if gated:
                await unless_client_leaves(reader, engine.gate.acquire())
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        if die:
            await asyncio.sleep(0.05)
            writer.transport.abort()
            return
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return behave


def hang() -> Behave:
    """Never answer; notice when the client leaves."""

    async def behave(engine, received, reader, writer):
        await client_left(reader)

    return behave


def gated(inner: Behave) -> Behave:
    """Answer once let go."""

    async def behave(engine, received, reader, writer):
        await unless_client_leaves(reader, engine.gate.acquire())
        await inner(engine, received, reader, writer)

    return behave


def hang_up(after: bytes = b"") -> Behave:
    """Close the connection after these bytes."""

    async def behave(engine, received, reader, writer):
        writer.write(after)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    return behave


class LoopThread:
    """An event loop of its own, so that tests can use blocking clients."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.loop = new_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coro):
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result(DEADLINE_SECONDS)

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    def stop(self) -> None:
        self.run(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(DEADLINE_SECONDS)
        self.loop.close()


class RunningRouter:
    """A router on its own thread, and what a test asks it over HTTP."""

    def __init__(self, lab: Lab, config: RouterConfig, **more) -> None:
        self.lab = lab
        self.config = config
        self.inner = Router(config, **more)
        self.host, self.port = lab.router_loop.run(self.inner.start())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metrics(self) -> dict:
        return parse_exposition(self.lab.router_loop.run(self._expose()).decode())

    async def _expose(self) -> bytes:
        return self.inner.registry.expose()

    def call(self, what: Callable, *arguments, **more):
        """What ``what`` returns, called within the router's own thread."""

        async def call():
            return what(*arguments, **more)

        return self.lab.router_loop.run(call())

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels."""
        samples = self.metrics().get(name, {})
        return sum(value for key, value in samples.items() if labels.items() <= dict(key).items())

    def wire(self) -> Wire:
        wire = Wire(self.port)
        self.lab.wires.append(wire)
        return wire

    def stop(self) -> None:
        self.lab.router_loop.run(self.inner.stop())


class Wire:
    """A client connection down to the bytes."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS)
        self.buffer = b""

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def post(self, body: bytes, target: str = "/v1/completions", headers: str = "") -> None:
        self.send(
            f"POST {target} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )

    def prompt(self, prompt: str = "hello", model: str = "m") -> None:
        self.post(json.dumps({"model": model, "prompt": prompt}).encode())

    def get(self, target: str) -> tuple[int, list[tuple[str, str]], bytes]:
        self.send(f"GET {target} HTTP/1.1\r\nHost: router\r\n\r\n".encode())
        return self.response()

    def _fill(self) -> None:
        data = self.sock.recv(1 << 18)
        if not data:
            raise EOFError(self.buffer)
        self.buffer += data

    def until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            self._fill()
        before, _, self.buffer = self.buffer.partition(mark)
        return before

    def exactly(self, nbytes: int) -> bytes:
        while len(self.buffer) < nbytes:
            self._fill()
        data, self.buffer = self.buffer[:nbytes], self.buffer[nbytes:]
        return data

    def head(self) -> tuple[int, list[tuple[str, str]]]:
        lines = self.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        return int(lines[0].split()[1]), [tuple(line.split(": ", 1)) for line in lines[1:]]

    def chunk(self) -> bytes:
        data = self.exactly(int(self.until(b"\r\n"), 16))
        assert self.exactly(2) == b"\r\n"
        return data

    def response(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """Status, header lines (names in lower case) and body; checks the framing."""
        status, lines = self.head()
        lines = [(name.lower(), value) for name, value in lines]
        fields = dict(lines)
        if "content-length" in fields:
            return status, lines, self.exactly(int(fields["content-length"]))
        if fields.get("transfer-encoding") == "chunked":
            pieces = list(iter(self.chunk, b""))
            return status, lines, b"".join(pieces)
        return status, lines, b""

    def error(self) -> tuple[int, dict]:
        status, lines, body = self.response()
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, {**error, "headers": dict(lines)}

    def rest(self) -> bytes:
        """Everything up to the end of the connection, which must come."""
        with contextlib.suppress(EOFError):
            while True:
                self._fill()
        data, self.buffer = self.buffer, b""
        return data

    def close(self) -> None:
        self.sock.close()


class Lab:
    """Makes engines, routers and clients, and clears them away."""

    reply, raw, events, hang, gated, hang_up = map(staticmethod, (reply, raw, events, hang, gated, hang_up))

    def __init__(self) -> None:
        self.engines_loop = LoopThread(asyncio.new_event_loop)
        self.router_loop = LoopThread(uvloop.new_event_loop)
        self.routers: list[RunningRouter] = []
        self.wires: list[Wire] = []

    def engine(self, *models: str) -> ScriptedEngine:
        return ScriptedEngine(self, models or ("m",))

    def router(self, *engines: ScriptedEngine, **options) -> RunningRouter:
        """A router over engines named e0, e1, …; checks health every 50 ms unless told otherwise."""
        named = [(f"e{number}", engine.url) for number, engine in enumerate(engines)]
        options.setdefault("policy", "round-robin")
        options.setdefault("health", HealthChecks(interval_seconds=0.05, models_every=2))
        options.setdefault("timeouts", Timeouts(drain_seconds=0.2, sweep_seconds=0.02))
        router = RunningRouter(self, RouterConfig(engines=named, listen_port=0, **options))
        self.routers.append(router)
        return router

    @staticmethod
    def until(condition: Callable[[], object], what: str = "the condition") -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true"
            time.sleep(0.005)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()
        for router in self.routers:
            router.stop()
        self.router_loop.stop()
        self.engines_loop.stop()


@pytest.fixture
def lab():
    lab = Lab()
    yield lab
    lab.close()
