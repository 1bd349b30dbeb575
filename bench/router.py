"""CPU time that a router spends on a request: ours, and vllm-router (Rust) beside it when it is installed.

    python bench/router.py [--rounds 5] [--vllm-router PATH]

A canned engine, a router and this load generator run as three processes on loopback. What is measured is the CPU time
of the router process (all its threads, from /proc), which other load on the machine disturbs far less than elapsed
time. Systems take turns within a round; the figures are medians over the rounds. `pip install vllm-router` into an
environment of its own and pass the path of its script to compare. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import httptools
import uvloop

CONNECTIONS = 8
PROMPT_BYTES = 1800
SSE_CHUNKS = 64
DEADLINE_SECONDS = 30.0


class CannedEngine(asyncio.Protocol):
    """Answers at once: a completion of fixed bytes, or 64 events of a stream, each its own write."""

    EVENT = b'data: {"id":"c","object":"text_completion","model":"m","choices":[{"index":0,"text":" tok"}]}\n\n'
    COMPLETION = (
        b'{"id":"c","object":"text_completion","model":"m","choices":[{"index":0,"text":"' + b"x" * 200 + b'"}]}'
    )
    MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.parser = httptools.HttpRequestParser(self)
        self.url, self.body = b"", b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        body, self.body = self.body, b""
        if self.url.startswith(b"/v1/completions"):
            if b'"stream":true' in body:
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                self.event(0)
                return
            page = self.COMPLETION
        else:
            page = self.MODELS
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page)
        )

    def event(self, sent: int) -> None:
        if self.transport.is_closing():
            return
        if sent == SSE_CHUNKS:
            self.transport.write(b"0\r\n\r\n")
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(self.EVENT), self.EVENT))
        asyncio.get_running_loop().call_later(0.001, self.event, sent + 1)


async def run_engine(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(CannedEngine, "127.0.0.1", port)
    await server.serve_forever()


class Load(asyncio.Protocol):
    """One keep-alive connection that sends its requests one after the other and checks every answer."""

    def __init__(self, bodies: list[bytes], done: asyncio.Future[None]) -> None:
        self.bodies = bodies
        self.done = done
        self.next = 0
        self.parser = httptools.HttpResponseParser(self)
        self.received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.send()

    def send(self) -> None:
        body = self.bodies[self.next]
        self.next += 1
        self.transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: router\r\nuser-agent: bench\r\naccept: application/json\r\n"
            b"authorization: Bearer none\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the router closed the connection: {exc}"))

    def on_body(self, data: bytes) -> None:
        self.received += len(data)

    def on_message_complete(self) -> None:
        expected = {len(CannedEngine.COMPLETION), SSE_CHUNKS * len(CannedEngine.EVENT)}
        if self.parser.get_status_code() != 200 or self.received not in expected:
            self.done.set_exception(RuntimeError(f"status {self.parser.get_status_code()}, {self.received} bytes"))
            return
        self.received = 0
        if self.next < len(self.bodies):
            self.send()
        else:
            self.done.set_result(None)
            self.transport.close()


async def drive(port: int, requests: int, stream: bool, rng: random.Random) -> None:
    """Send ``requests`` over the connections: conversations of a shared 1 kB beginning and an end of their own."""
    loop = asyncio.get_running_loop()
    shared = [rng.randbytes(512).hex() for _ in range(16)]
    waiting = []
    for _ in range(CONNECTIONS):
        bodies = []
        for _ in range(requests // CONNECTIONS):
            own = rng.randbytes((PROMPT_BYTES - 1024) // 2).hex()
            fields = {"model": "m", "prompt": rng.choice(shared) + own, "max_tokens": 64, "stream": stream}
            bodies.append(json.dumps(fields, separators=(",", ":")).encode())
        done: asyncio.Future[None] = loop.create_future()
        await loop.create_connection(partial(Load, bodies, done), "127.0.0.1", port)
        waiting.append(done)
    await asyncio.gather(*waiting)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far (nanosecond resolution, /proc/PID/task/*/schedstat)."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until_routing(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, RuntimeError):
            uvloop.run(drive(port, CONNECTIONS, False, random.Random(0)))
            return
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} does not route")


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


def measure(command: list[str], port: int, posts: int, streams: int) -> tuple[float, float]:
    """Microseconds of router CPU a POST and a stream."""
    with running(command) as process:
        wait_until_routing(port, process)
        uvloop.run(drive(port, 400, False, random.Random(1)))
        figures = []
        for count, stream in ((posts, False), (streams, True)):
            before = cpu_seconds(process.pid)
            uvloop.run(drive(port, count, stream, random.Random(2)))
            figures.append((cpu_seconds(process.pid) - before) / count * 1e6)
        return figures[0], figures[1]


def systems(engine_ports: list[int], vllm_router: Path | None) -> dict[str, tuple[list[str], int]]:
    """Name → (command, port) of what is compared."""
    urls = [f"http://127.0.0.1:{port}" for port in engine_ports]
    ours = "from kvhearth.cli.router import app; app()"
    found: dict[str, tuple[list[str], int]] = {}
    for policy in ("prefix", "round-robin"):
        port = free_port()
        engines = [word for url in urls for word in ("--engine", url)]
        listen = ["--listen", f"127.0.0.1:{port}", "--policy", policy]
        found[f"kvhearth {policy}"] = ([sys.executable, "-c", ours, "serve", *listen, *engines], port)
    if vllm_router is None or not vllm_router.exists():
        print(
            f"skipped vllm-router: {vllm_router or 'no path given'} (pip install vllm-router, then --vllm-router PATH)"
        )
        return found
    for policy in ("cache_aware", "round_robin"):
        port = free_port()
        options = [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--prometheus-port",
            str(free_port()),
            "--policy",
            policy,
        ]
        found[f"vllm-router {policy}"] = ([str(vllm_router), *options, "--worker-urls", *urls], port)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--posts", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 2,000 posts and 100 streams")
    parser.add_argument("--vllm-router", type=Path, default=os.environ.get("VLLM_ROUTER"))
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.posts, options.streams = 3, 2000, 100
    if options.engine:
        uvloop.run(run_engine(options.engine))
        return
    ports = [free_port(), free_port()]
    results: dict[str, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(running([sys.executable, __file__, "--engine", str(port)]))
        compared = systems(ports, options.vllm_router and Path(options.vllm_router))
        for number in range(options.rounds):
            for name, (command, port) in compared.items():
                figures = measure(command, port, options.posts, options.streams)
                results.setdefault(name, []).append(figures)
                print(
                    f"round {number + 1}  {name:24} {figures[0]:7.1f} µs a POST {figures[1]:8.0f} µs a stream",
                    flush=True,
                )
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in results.items()
    }
    base = medians["kvhearth prefix"]
    for name, (post, stream) in medians.items():
        print(f"{name:24} {post:7.1f} ({post / base[0]:.2f}x)  {stream:8.0f} ({stream / base[1]:.2f}x)")
    print(json.dumps({name: {"post_us": round(post, 1), "stream_us": round(s)} for name, (post, s) in medians.items()}))


if __name__ == "__main__":
    main()
