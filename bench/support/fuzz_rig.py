"""The engines and the router of the fuzz as running servers, and what can be seen of the router from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import zmq
import zmq.asyncio

from kvhearth.metrics import parse_exposition
from support.fuzz_answers import Asked, Broken, length_of, right_answer, right_page, wrong_answer
from support.fuzz_events import event_batch
from support.fuzzing import Answer

DEADLINE_SECONDS = 20.0
HEAD_BYTES = 1 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LEFT = (ConnectionError, asyncio.IncompleteReadError, RuntimeError)  # the last is uvloop's, for what is closed
_TROUBLE = ("Traceback", " ERROR ", " CRITICAL ", "never retrieved", "never awaited", "Exception ignored")


class Engine:
    """One engine. A good one answers right; a bad one, once it has told its model, as the request's nonce draws it."""

    def __init__(self, name: str, *, good: bool, seed: int) -> None:
        self.name = name
        self.good = good
        self.url = ""
        self.broken: list[str] = []
        self.served = 0
        self._seed = seed
        self._rng = random.Random(f"{seed}/{name}")
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD_BYTES, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(
                ConnectionError, asyncio.IncompleteReadError, RuntimeError
            ):  # uvloop: it is closed
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    asked = Asked(head, await reader.readexactly(length_of(head)))
                    if not await self._answered(asked, reader, writer):
                        break
        except Broken as broken:
            self.broken.append(f"{self.name}: {broken}")
        except asyncio.CancelledError:
            pass
        finally:
            writer.transport.abort()

    async def _answered(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.served += 1
        if asked.head.startswith(b"GET"):
            page = right_page(asked, "good" if self.good else "bad")
            if not self.good and self.served > 20 and self._rng.random() < 0.1:
                page = wrong_answer(self._seed, f"{self._rng.getrandbits(64):016x}").pieces[0]
            writer.write(page)
            await writer.drain()
            return True
        answer = right_answer(asked) if self.good else wrong_answer(self._seed, asked.nonce)
        return await _written(answer, reader, writer)


async def _written(answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    for piece in answer.pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    if answer.end == "reset":
        writer.transport.abort()
    elif answer.end == "close":
        writer.close()
    elif answer.end == "hang":
        await reader.read(1)
    return answer.end == "keep"


class Events:
    """Publishes KV events for an engine, sound and broken ones, until it is closed."""

    def __init__(self, seed: int) -> None:
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.url = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._rng = random.Random(seed)
        self._sequence = 0

    async def publish(self, batches: int) -> None:
        for _ in range(batches):
            rng = self._rng
            self._sequence = max(0, self._sequence + rng.choices((1, 0, 2, -3, -(10**9)), (90, 3, 3, 2, 1))[0])
            frames = [b"", self._sequence.to_bytes(8, "big"), event_batch(rng)]
            if rng.random() < 0.02:
                frames = [rng.randbytes(rng.randrange(12)) for _ in range(rng.randint(1, 4))]
            await self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close()


class RouterProcess:
    """A router as a process of its own, so that its memory, descriptors and log are its alone."""

    def __init__(self, policy: str, engines: list[Engine], events: dict[str, Events]) -> None:
        self.policy = policy
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._read = 0
        command = [sys.executable, str(Path(__file__).with_name("fuzz_router.py")), policy]
        command += [f"{engine.name}={engine.url}" for engine in engines]
        command += [f"{name}={source.url}" for name, source in events.items()]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log)
        self.port = 0

    async def ready(self) -> None:
        """Wait for its port."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            raise SystemExit(f"the router did not start: {self.trouble()}")
        self.port = int(line)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def trouble(self) -> str:
        """What it has logged since the last look, if that tells of an error of its own making."""
        self._log.seek(self._read)
        text = self._log.read().decode("utf-8", "replace")
        self._read += len(text.encode("utf-8", "replace"))
        return text[-6000:] if any(mark in text for mark in _TROUBLE) or not self.alive else ""

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * _PAGE_BYTES

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    async def page(self, target: str) -> tuple[int, bytes]:
        """Status and body of one of its pages; raises OSError or TimeoutError when there is none in time."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
            try:
                writer.write(f"GET {target} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n".encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                return int(head.split(b" ")[1]), body
            finally:
                writer.close()

    async def left_over(self) -> str:
        """What its tables still hold, when all clients have left; waits for that a while. "" = nothing."""
        gauges = {
            "kvhearth_router_exchanges": 0.0,
            "kvhearth_router_buffered_bytes": 0.0,
            "kvhearth_router_requests_in_flight": 0.0,
            "kvhearth_router_in_flight_tokens": 0.0,
            "kvhearth_router_prefill_tokens": 0.0,
            "kvhearth_router_client_connections": 1.0,  # which asks
        }
        loop = asyncio.get_running_loop()
        give_up = loop.time() + DEADLINE_SECONDS
        while True:
            metrics = parse_exposition((await self.page("/metrics"))[1].decode())
            found = {name: sum(metrics[name].values()) for name in gauges}
            wrong = {name: value for name, value in found.items() if value != gauges[name]}
            if not wrong or loop.time() > give_up:
                return str(wrong) if wrong else ""
            await asyncio.sleep(0.1)
