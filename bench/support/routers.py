"""Canned engines, routers to put before them, and a load generator with one keep-alive connection a client; what
`bench/router.py` measures and other benchmarks of routers start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
CLIENTS = 64
PROMPT_BYTES = 1800
SSE_CHUNKS = 64
APART_SECONDS = 0.02
"""Between two events of a stream, so that each is a read of its own to a router."""
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


class BenchEngine(asyncio.Protocol):
    """The HTTP of an engine that says what a bench wants: `answer` is called with each request."""

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
        self.answer(self.url, body)

    def answer(self, url: bytes, body: bytes) -> None:
        """Say something: a page, or a stream begun."""
        raise NotImplementedError

    def page(self, page: bytes) -> None:
        """A whole answer."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(page) + page)

    def stream(self, count: int, apart_seconds: float, event: Callable[[int], bytes]) -> None:
        """``count`` events, each its own write, so far apart."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.transport.write(head)
        self._tell(0, count, apart_seconds, event)

    def _tell(self, number: int, count: int, apart_seconds: float, event: Callable[[int], bytes]) -> None:
        if self.transport.is_closing():
            return
        if number == count:
            self.transport.write(b"0\r\n\r\n")
            return
        data = event(number)
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        asyncio.get_running_loop().call_later(apart_seconds, self._tell, number + 1, count, apart_seconds, event)


class CannedEngine(BenchEngine):
    """Answers at once: a completion of fixed bytes, or 64 events of a stream, each its own write."""

    publisher: Publisher | None = None

    EVENT = b'data: {"id":"c","object":"text_completion","model":"m","choices":[{"index":0,"text":" tok"}]}\n\n'
    COMPLETION = (
        b'{"id":"c","object":"text_completion","model":"m","choices":[{"index":0,"text":"' + b"x" * 200 + b'"}]}'
    )

    def answer(self, url: bytes, body: bytes) -> None:
        if url.startswith((b"/tokenize", b"/v1/completions/render")):
            ids = token_ids(msgspec.json.decode(body)["prompt"])
            if url.startswith(b"/tokenize"):
                self.page(msgspec.json.encode({"count": len(ids), "max_model_len": 8192, "tokens": ids}))
            else:
                self.page(msgspec.json.encode([{"request_id": "r", "token_ids": ids}]))
        elif url.startswith(b"/v1/completions"):
            if self.publisher is not None:
                self.publisher.hold(token_ids(msgspec.json.decode(body)["prompt"]))
            if b'"stream":true' in body:
                self.stream(SSE_CHUNKS, APART_SECONDS, lambda _: self.EVENT)
            else:
                self.page(self.COMPLETION)
        else:
            self.page(self.MODELS)


async def run_engine(port: int, events: int) -> None:
    """Serve until killed."""
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


async def drive(
    port: int,
    requests: int,
    rng: random.Random,
    *,
    stream: bool = False,
    clients: int = CLIENTS,
    prompt_bytes: int = PROMPT_BYTES,
) -> list[float]:
    """Send ``requests`` in all: conversations with a beginning that a sixteenth of them share, of more than half their
    length, and an end of their own. Returns the times to a whole answer, in seconds, sorted."""
    loop = asyncio.get_running_loop()
    common = prompt_bytes * 4 // 14
    shared = [rng.randbytes(common).hex() for _ in range(16)]
    waiting: list[asyncio.Future[None]] = []
    took: list[float] = []
    for _ in range(clients):
        bodies = []
        for _ in range(max(1, requests // clients)):
            own = rng.randbytes(prompt_bytes // 2 - common).hex()
            fields = {"model": "m", "prompt": rng.choice(shared) + own, "max_tokens": 64, "stream": stream}
            bodies.append(json.dumps(fields, separators=(",", ":")).encode())
        done: asyncio.Future[None] = loop.create_future()
        await loop.create_connection(partial(Load, bodies, done, took), "127.0.0.1", port)
        waiting.append(done)
    await asyncio.gather(*waiting)
    return sorted(took)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far (nanosecond resolution, /proc/PID/task/*/schedstat)."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


_given: set[int] = set()


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def free_port() -> int:
    """A port that nobody has, nor was given before: who was given one may not have taken it yet."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def wait_until_routing(port: int, process: subprocess.Popen[bytes] | None) -> None:
    """Until requests are answered through the router.

    Raises:
        RuntimeError: it ended, or does not route in time.
    """
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline and (process is None or process.poll() is None):
        with contextlib.suppress(OSError, RuntimeError):
            uvloop.run(drive(port, 8, random.Random(0), clients=8))
            return
        time.sleep(0.1)
    raise RuntimeError(f"{'the engine' if process is None else process.args!r} does not answer")


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the context lasts."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


class Setting(NamedTuple):
    """What every router is told: the engines, and where each publishes its events."""

    urls: list[str]
    events: list[int]


class System(NamedTuple):
    """A router with a policy, and how it is started."""

    name: str
    policy: str
    command: list[str]
    port: int


def ours(at: Setting, policy: str) -> System:
    """Our router, by this interpreter."""
    port = free_port()
    words = ["--listen", f"127.0.0.1:{port}", "--policy", policy]
    for number, url in enumerate(at.urls):
        words += ["--engine", f"e{number}={url}"]
        if policy == "kv-aware":
            words += ["--kv-events", f"e{number}=tcp://127.0.0.1:{at.events[number]}"]
    code = "from kvhearth.cli.router import app; app()"
    return System("ours", policy, [sys.executable, "-c", code, "serve", *words], port)


def vllm_router(at: Setting, script: str, policy: str) -> System:
    """`pip install vllm-router`."""
    port = free_port()
    words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--policy", policy]
    words += ["--worker-urls", *at.urls]
    if policy == "kv_aware":
        for url, events in zip(at.urls, at.events, strict=True):
            words += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{events}"]
        words += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", "m"]
    return System("vllm-router", policy, [script, *words], port)


def sglang_router(at: Setting, script: str) -> System:
    """`pip install sglang-router`."""
    port = free_port()
    words = ["launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return System(
        "sglang-router", "round_robin", [script, *words, "--policy", "round_robin", "--worker-urls", *at.urls], port
    )


def production_stack(at: Setting, script: str) -> System:
    """The router of production-stack."""
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
    return System("production-stack", "round_robin", [script, *words], port)
