"""CPU time that a router spends on a request: ours, and others beside it where they are installed.

    python bench/router.py [--rounds 5] [--vllm-router PATH] [--sglang-router PATH] [--production-stack PATH]

Canned engines, a router and this load generator run as processes of their own on loopback. What is measured is the CPU
time of the router process (all its threads, from /proc), which other load on the machine disturbs far less than elapsed
time; and, one request at a time, the p99 of what a router adds to a POST. Systems take turns within a round; the
figures are medians over the rounds. The engines publish KV events for what they were asked, so that the policies that
follow events have some to follow, and render prompts to token ids for who asks.

`pip install vllm-router`, `pip install sglang-router`, or production-stack's own, each into an environment of its own,
and pass the path of its script. The last line is JSON.
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
from typing import NamedTuple, cast

import httptools
import msgspec
import uvloop
import xxhash
import zmq

BLOCK_TOKENS = 16
MOST_BLOCKS = 200_000
CONNECTIONS = 8
PROMPT_BYTES = 1800
SSE_CHUNKS = 64
DEADLINE_SECONDS = 30.0


def token_ids(prompt: str) -> list[int]:
    """As if four characters were a token."""
    raw = prompt.encode()
    return [int.from_bytes(raw[at : at + 4]) % 128_000 for at in range(0, len(raw), 4)]


class Publisher:
    """Tells on an event socket, as vLLM does, which blocks an engine holds since it saw a prompt."""

    def __init__(self, port: int) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self.socket.bind(f"tcp://127.0.0.1:{port}")
        self.known: set[int] = set()
        self.batches = 0

    def hold(self, ids: list[int]) -> None:
        """The prompt's blocks are held from now on; one event has those that are new."""
        hashes: list[int] = []
        parent: int | None = None
        first, at = parent, 0
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = xxhash.xxh3_64_intdigest(repr((parent, ids[start : start + BLOCK_TOKENS])).encode())
            if hashes or block not in self.known:
                if not hashes:
                    first, at = parent, start
                hashes.append(block)
            parent = block
        if not hashes or len(self.known) > MOST_BLOCKS:
            return
        self.known.update(hashes)
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": first,
            "token_ids": ids[at : at + len(hashes) * BLOCK_TOKENS],
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        self.socket.send_multipart([b"", self.batches.to_bytes(8, "big"), payload])
        self.batches += 1


class CannedEngine(asyncio.Protocol):
    """Answers at once: a completion of fixed bytes, or 64 events of a stream, each its own write."""

    publisher: Publisher | None = None

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
        if self.url.startswith((b"/tokenize", b"/v1/completions/render")):
            ids = token_ids(msgspec.json.decode(body)["prompt"])
            if self.url.startswith(b"/tokenize"):
                page = msgspec.json.encode({"count": len(ids), "max_model_len": 8192, "tokens": ids})
            else:
                page = msgspec.json.encode([{"request_id": "r", "token_ids": ids}])
        elif self.url.startswith(b"/v1/completions"):
            if self.publisher is not None:
                self.publisher.hold(token_ids(msgspec.json.decode(body)["prompt"]))
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


async def run_engine(port: int, events: int) -> None:
    CannedEngine.publisher = Publisher(events)
    server = await asyncio.get_running_loop().create_server(CannedEngine, "127.0.0.1", port)
    await server.serve_forever()


class Load(asyncio.Protocol):
    """One keep-alive connection that sends its requests one after the other and checks every answer."""

    def __init__(self, bodies: list[bytes], done: asyncio.Future[None], took: list[float]) -> None:
        self.bodies = bodies
        self.took = took
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
        self.sent_at = time.perf_counter()
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
        self.took.append(time.perf_counter() - self.sent_at)
        if self.next < len(self.bodies):
            self.send()
        else:
            self.done.set_result(None)
            self.transport.close()


async def drive(port: int, requests: int, stream: bool, rng: random.Random, connections: int = CONNECTIONS) -> float:
    """Send ``requests`` over the connections: conversations of a shared 1 kB beginning and an end of their own. Returns
    the p99 of the times to a whole answer, in seconds."""
    loop = asyncio.get_running_loop()
    shared = [rng.randbytes(512).hex() for _ in range(16)]
    waiting: list[asyncio.Future[None]] = []
    took: list[float] = []
    for _ in range(connections):
        bodies = []
        for _ in range(requests // connections):
            own = rng.randbytes((PROMPT_BYTES - 1024) // 2).hex()
            fields = {"model": "m", "prompt": rng.choice(shared) + own, "max_tokens": 64, "stream": stream}
            bodies.append(json.dumps(fields, separators=(",", ":")).encode())
        done: asyncio.Future[None] = loop.create_future()
        await loop.create_connection(partial(Load, bodies, done, took), "127.0.0.1", port)
        waiting.append(done)
    await asyncio.gather(*waiting)
    return sorted(took)[int(0.99 * len(took))]


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


class Figures(NamedTuple):
    """Microseconds: of router CPU a POST and a stream, and of the 99th percentile of a POST one at a time."""

    post_us: float
    stream_us: float
    p99_us: float


class Setting(NamedTuple):
    """What every router is told: the engines, and where each publishes its events."""

    urls: list[str]
    events: list[int]


class System(NamedTuple):
    """A router with a policy, and how it is started."""

    name: str
    command: list[str]
    port: int


def measure(system: System, posts: int, streams: int) -> Figures:
    """One round of one system."""
    with running(system.command) as process:
        wait_until_routing(system.port, process)
        uvloop.run(drive(system.port, 400, False, random.Random(1)))
        found = []
        for count, stream in ((posts, False), (streams, True)):
            before = cpu_seconds(process.pid)
            uvloop.run(drive(system.port, count, stream, random.Random(2)))
            found.append((cpu_seconds(process.pid) - before) / count * 1e6)
        p99 = uvloop.run(drive(system.port, max(200, posts // 8), False, random.Random(3), connections=1))
        return Figures(found[0], found[1], p99 * 1e6)


def ours(at: Setting, policy: str) -> System:
    port = free_port()
    words = ["--listen", f"127.0.0.1:{port}", "--policy", policy]
    for number, url in enumerate(at.urls):
        words += ["--engine", f"e{number}={url}"]
        if policy == "kv-aware":
            words += ["--kv-events", f"e{number}=tcp://127.0.0.1:{at.events[number]}"]
    code = "from kvhearth.cli.router import app; app()"
    return System(f"kvhearth {policy}", [sys.executable, "-c", code, "serve", *words], port)


def vllm_router(at: Setting, script: str, policy: str) -> System:
    port = free_port()
    words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--policy", policy]
    words += ["--worker-urls", *at.urls]
    if policy == "kv_aware":
        for url, events in zip(at.urls, at.events, strict=True):
            words += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{events}"]
        words += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", "m"]
    return System(f"vllm-router {policy}", [script, *words], port)


def sglang_router(at: Setting, script: str) -> System:
    port = free_port()
    words = ["launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return System(
        "sglang-router round_robin", [script, *words, "--policy", "round_robin", "--worker-urls", *at.urls], port
    )


def production_stack(at: Setting, script: str) -> System:
    port = free_port()
    words = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--service-discovery",
        "static",
        "--routing-logic",
        "roundrobin",
    ]
    words += ["--static-backends", ",".join(at.urls), "--static-models", ",".join("m" for _ in at.urls)]
    return System("production-stack roundrobin", [script, *words], port)


def systems(at: Setting, options: argparse.Namespace) -> list[System]:
    """What is compared: ours, and whoever is there."""
    found = [ours(at, policy) for policy in ("round-robin", "prefix", "kv-aware")]
    if options.vllm_router:
        found += [vllm_router(at, options.vllm_router, policy) for policy in ("round_robin", "cache_aware", "kv_aware")]
    if options.sglang_router:
        found.append(sglang_router(at, options.sglang_router))
    if options.production_stack:
        found.append(production_stack(at, options.production_stack))
    for name in ("vllm_router", "sglang_router", "production_stack"):
        if not getattr(options, name):
            print(f"skipped {name.replace('_', '-')}: give the path of its script with --{name.replace('_', '-')}")
    return found


TARGETS = (
    ("kvhearth round-robin", "vllm-router round_robin", "post_us", 1.0),
    ("kvhearth prefix", "vllm-router cache_aware", "post_us", 0.6),
    ("kvhearth kv-aware", "vllm-router kv_aware", "post_us", 1.0),
    ("kvhearth round-robin", "sglang-router round_robin", "post_us", 0.6),
    ("kvhearth round-robin", "production-stack roundrobin", "post_us", 0.1),
    ("kvhearth round-robin", "vllm-router round_robin", "stream_us", 0.8),
    ("kvhearth round-robin", "vllm-router round_robin", "p99_us", 1.0),
    ("kvhearth prefix", "vllm-router cache_aware", "p99_us", 1.0),
    ("kvhearth kv-aware", "vllm-router kv_aware", "p99_us", 1.0),
)
"""Whom we compare which of ours with, in what, and how many times theirs it may be."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--posts", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 2,000 posts and 100 streams")
    for name in ("vllm-router", "sglang-router", "production-stack"):
        variable = name.replace("-", "_").upper()
        parser.add_argument(f"--{name}", metavar="PATH", default=os.environ.get(variable), help=f"script of {name}")
    parser.add_argument("--engine", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.posts, options.streams = 3, 2000, 100
    if options.engine:
        uvloop.run(run_engine(*options.engine))
        return
    results: dict[str, list[Figures]] = {}
    with contextlib.ExitStack() as stack:
        pairs = [(free_port(), free_port()) for _ in range(2)]
        for port, events in pairs:
            stack.enter_context(running([sys.executable, __file__, "--engine", str(port), str(events)]))
        setting = Setting([f"http://127.0.0.1:{port}" for port, _ in pairs], [events for _, events in pairs])
        compared = systems(setting, options)
        for number in range(options.rounds):
            for system in compared:
                found = measure(system, options.posts, options.streams)
                results.setdefault(system.name, []).append(found)
                print(
                    f"round {number + 1}  {system.name:28} {found.post_us:7.1f} µs a POST {found.stream_us:8.0f} µs a "
                    f"stream  p99 {found.p99_us:7.0f} µs",
                    flush=True,
                )
    report(results)


def report(results: dict[str, list[Figures]]) -> None:
    """Medians, ratios to what we compare ourselves with, and the JSON line. A ratio is the median over the rounds of
    that round's, for systems that took turns."""
    print("\nmedians")
    for name, rounds in results.items():
        post, stream, p99 = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:28} {post:7.1f} µs a POST {stream:8.0f} µs a stream  p99 {p99:7.0f} µs")
    ratios = {}
    for mine, theirs, figure, most in TARGETS:
        if theirs in results:
            pairs = zip(results[mine], results[theirs], strict=True)
            ratio = statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in pairs)
            ratios[f"{mine} / {theirs}, {figure}"] = round(ratio, 3)
            print(f"{mine} / {theirs}, {figure}: {ratio:.2f} (target: at most {most})")
    medians = {
        name: {
            field: round(statistics.median(getattr(found, field) for found in rounds), 1) for field in Figures._fields
        }
        for name, rounds in results.items()
    }
    print(json.dumps({"bench": "router", "medians": medians, "ratio": ratios}))


if __name__ == "__main__":
    main()
