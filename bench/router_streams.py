"""Many streams at once through our router: is a byte lost, does `/health` still answer, does memory stay?

    python bench/router_streams.py [--quick] [--streams 1000] [--seconds 60] [--requests 100000]

Two engines stream to 1,000 clients for a minute; every piece of every stream is told by its number, so that the client
knows each byte that it must get. A third engine takes connections and never answers. Meanwhile another process asks
`/health` twenty times a second. Then short requests follow, and every table of the router must be empty again. The last
line is JSON; the exit code is 1 when something was lost, left over or grew, or `/health` took a second (p99).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import cast

import httptools
import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from support.routers import BenchEngine, free_port, rss_mib, running

from kvhearth.metrics import parse_exposition
from kvhearth.metrics import router as names

TABLES = (names.EXCHANGES, names.REQUESTS_IN_FLIGHT, names.TOKENS_IN_FLIGHT, names.PREFILL_TOKENS, names.BUFFERED_BYTES)
"""Gauges of what a request must leave nothing in."""
DEADLINE_SECONDS = 60.0
WARM_REQUESTS = 2_000
CONNECTIONS = 64
HEALTH_EVERY_SECONDS = 0.05
MOST_GROWTH_MIB = 8.0
"""Of resident memory between the second and the last third of the streams, and by the short requests: flat, but for
what an allocator does."""


def piece(stream: int, number: int) -> bytes:
    """What an engine sends as a stream's piece of that number: between 40 and 540 bytes."""
    filler = b"%08x" % ((stream * 2654435761 + number * 40503) & 0xFFFFFFFF)
    return b"data: %d %d %b\n\n" % (stream, number, filler * (1 + (stream + number) % 60))


class Engine(BenchEngine):
    """Streams what it is asked for: so many pieces, so far apart."""

    def answer(self, url: bytes, body: bytes) -> None:
        asked = json.loads(body) if url.startswith(b"/v1/completions") else {}
        if "pieces" in asked:
            self.stream(asked["pieces"], asked["apart_seconds"], partial(piece, asked["stream_id"]))
        else:
            self.page(json.dumps({"model": "m", "text": asked["prompt"]}).encode() if asked else self.MODELS)


class Mute(asyncio.Protocol):
    """Takes connections and says nothing."""


class Client(asyncio.Protocol):
    """One request, ``count`` times, and what came of it: `done` has the bytes of the last body, or the fault. ``told``
    must be in every one."""

    def __init__(self, body: bytes, count: int = 1, told: bytes = b"") -> None:
        self.body = body
        self.told = told
        self.left = count
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)
        self.pieces: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.ask()

    def ask(self) -> None:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        self.transport.write(head % len(self.body) + self.body)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.pieces.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self.pieces)
        self.pieces.clear()
        self.left -= 1
        if self.told and self.told not in body:
            self.fail(f"an answer to somebody else: {body[:200]!r}")
        elif self.parser.get_status_code() != 200:
            self.fail(f"status {self.parser.get_status_code()}: {body[:200]!r}")
        elif self.left:
            self.ask()
        else:
            self.done.set_result(body)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(f"connection lost: {exc}")

    def fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(why))
            self.transport.close()


async def stream_all(
    port: int, streams: int, seconds: float, apart_seconds: float, progress: Progress
) -> dict[str, int]:
    """All streams to their end; counts pieces, bytes that did not come or were others, and errors."""
    pieces = max(1, int(seconds / apart_seconds))
    task = progress.add_task("streams", total=streams)

    async def one(stream: int) -> bytes:
        await asyncio.sleep(stream * min(1.0, 2.0 / streams))
        asked = {"model": "m", "prompt": f"p{stream}", "stream": True, "stream_id": stream, "pieces": pieces}
        body = json.dumps({**asked, "apart_seconds": apart_seconds}).encode()
        _, client = await asyncio.get_running_loop().create_connection(partial(Client, body), "127.0.0.1", port)
        try:
            return await asyncio.wait_for(client.done, seconds * 2 + DEADLINE_SECONDS)
        finally:
            progress.advance(task)

    found = await asyncio.gather(*map(one, range(streams)), return_exceptions=True)
    lost = wrong = errors = 0
    for stream, got in enumerate(found):
        expected = b"".join(piece(stream, number) for number in range(pieces))
        if isinstance(got, BaseException):
            errors += 1
            print(f"stream {stream}: {got}", file=sys.stderr)
            lost += len(expected)
        elif got != expected:
            lost += max(0, len(expected) - len(got))
            wrong += sum(a != b for a, b in zip(got, expected, strict=False)) + max(0, len(got) - len(expected))
    return {"chunks": streams * pieces, "bytes_lost": lost, "bytes_wrong": wrong, "errors": errors}


async def ask_all(port: int, requests: int, progress: Progress) -> int:
    """Short requests over keep-alive connections; how many connections failed."""
    each = requests // CONNECTIONS
    task = progress.add_task("short requests", total=each * CONNECTIONS)

    async def one(number: int) -> None:
        prompt = f"short {number}."
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        ask = partial(Client, body, each, prompt.encode())
        _, client = await asyncio.get_running_loop().create_connection(ask, "127.0.0.1", port)
        await asyncio.wait_for(client.done, 600)
        progress.advance(task, each)

    found = await asyncio.gather(*map(one, range(CONNECTIONS)), return_exceptions=True)
    for fault in [one for one in found if one is not None][:3]:
        print(f"short requests: {fault}", file=sys.stderr)
    return sum(one is not None for one in found)


def watch_health(port: int) -> None:
    """Ask `/health` at fixed times until told to stop by the end of stdin; then print, as JSON, the milliseconds from
    when each answer was due to be asked for, and how many were no 200."""
    took: list[float] = []
    faults = 0
    os.set_blocking(0, False)
    due = time.perf_counter()
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
                answer.read()
        except OSError:
            faults += 1
        took.append((time.perf_counter() - due) * 1e3)
        with contextlib.suppress(BlockingIOError):
            if os.read(0, 1) == b"":
                break
        due += HEALTH_EVERY_SECONDS
        time.sleep(max(0.0, due - time.perf_counter()))
    print(json.dumps([took, faults]))


@contextlib.contextmanager
def watched(port: int, found: dict[str, float]) -> Iterator[None]:
    """While this lasts another process asks `/health`; ``found`` is filled at the end."""
    words = [sys.executable, __file__, "--watch", str(port)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
    took, faults = json.loads(out)
    took.sort()
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        found[f"health_{name}_ms"] = round(took[int(share * (len(took) - 1))], 2)
    found["health_faults"] = faults


async def sample_rss(pid: int, found: list[float]) -> None:
    while True:
        found.append(rss_mib(pid))
        await asyncio.sleep(0.5)


def left_over(port: int) -> dict[str, float]:
    """What the router still counts of requests, by gauge; waits a moment for the last one's end."""
    deadline = time.monotonic() + 10
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            page = parse_exposition(answer.read().decode())
        shown = [table.exposed_name for table in TABLES]
        missing = [name for name in shown if name not in page]
        if missing:
            raise RuntimeError(f"the router shows no {', '.join(missing)}")
        left = {name: sum(page[name].values()) for name in shown}
        if not any(left.values()) or time.monotonic() > deadline:
            return {name: value for name, value in left.items() if value}
        time.sleep(0.2)


async def measure(port: int, pid: int, options: argparse.Namespace, progress: Progress) -> dict[str, float | int]:
    await ask_all(port, WARM_REQUESTS, progress)
    health: dict[str, float] = {}
    memory: list[float] = []
    sampling = asyncio.ensure_future(sample_rss(pid, memory))
    with watched(port, health):
        told = await stream_all(port, options.streams, options.seconds, options.apart_seconds, progress)
    sampling.cancel()
    third = max(1, len(memory) // 3)  # the first third has connections that come
    growth = statistics.median(memory[-third:]) - statistics.median(memory[third : 2 * third])
    before = rss_mib(pid)
    failed = await ask_all(port, options.requests, progress)
    return {
        **told,
        "errors": told["errors"] + failed,
        **health,
        "rss_growth_mb": round(growth, 2),
        "rss_growth_by_short_requests_mb": round(rss_mib(pid) - before, 2),
    }


async def serve_engine(port: int, *, mute: bool) -> None:
    server = await asyncio.get_running_loop().create_server(Mute if mute else Engine, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--apart-seconds", type=float, default=0.5, help="between two pieces of a stream")
    parser.add_argument("--requests", type=int, default=100_000, help="short ones, after the streams")
    parser.add_argument("--quick", action="store_true", help="300 streams for 15 s, 10,000 short requests")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mute", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--watch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        watch_health(options.watch)
        return 0
    if options.engine or options.mute:
        uvloop.run(serve_engine(options.engine or options.mute, mute=bool(options.mute)))
        return 0
    if options.quick:
        options.streams, options.seconds, options.requests = 300, 15.0, 10_000
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(3)]
        for number, port in enumerate(ports):
            kind = "--mute" if number == 2 else "--engine"
            stack.enter_context(running([sys.executable, __file__, kind, str(port)]))
        port = free_port()
        words = ["serve", "--listen", f"127.0.0.1:{port}", "--policy", "round-robin"]
        for number, engine in enumerate(ports):
            words += ["--engine", f"e{number}=http://127.0.0.1:{engine}"]
        code = "from kvhearth.cli.router import app; app()"
        router = stack.enter_context(running([sys.executable, "-c", code, *words]))
        wait_until_healthy(port)
        with Progress(console=Console(stderr=True)) as progress:
            figures = uvloop.run(measure(port, router.pid, options, progress))
        left = left_over(port)
    return report(figures, left, options)


def wait_until_healthy(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5),
        ):
            return
        time.sleep(0.1)
    raise RuntimeError("the router does not become healthy")


def report(figures: dict[str, float | int], left: dict[str, float], options: argparse.Namespace) -> int:
    """A table, the JSON line, and the exit code."""
    table = Table(
        title=f"{options.streams} streams for {options.seconds:g} s, then {options.requests:,} short requests"
    )
    for column in ("what", "figure"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    table.add_row("left in tables", ", ".join(left) or "nothing")
    Console(width=100).print(table)
    faults = ("bytes_lost", "bytes_wrong", "errors", "health_faults")
    grown = max(figures["rss_growth_mb"], figures["rss_growth_by_short_requests_mb"])
    sound = not (any(figures[name] for name in faults) or left) and grown < MOST_GROWTH_MIB
    shown = {"streams": options.streams, "seconds": options.seconds, **figures, "requests": options.requests}
    print(json.dumps({"bench": "router_streams", **shown, "tables_empty": not left}))
    return 0 if sound and figures["health_p99_ms"] < 1000 else 1


if __name__ == "__main__":
    sys.exit(main())
