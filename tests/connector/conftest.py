"""Real stores on free ports, stores that do as a script says, and rows with threads that move them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvhearth.connector import puts
from kvhearth.connector.transfers import Finished, Transfers
from kvhearth.store.client.client import StoreClient
from kvhearth.store.protocol.packed import MAGIC, unpack_keys
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

MIB = 2**20
ROW_BYTES = 4096

Hook = Callable[[bytes, list[bytes]], bytes | None]
"""Sees a command before a `ScriptedStore` obeys it: None goes on, bytes are sent in its place, OSError cuts."""


class ScriptedStore:
    """A store of a few commands in a dictionary, in which ``hook`` may answer, delay or cut."""

    def __init__(self, hook: Hook) -> None:
        self.values: dict[bytes, bytes] = {}
        self.seen: list[tuple[bytes, list[bytes]]] = []
        self._hook = hook
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def names(self) -> list[bytes]:
        """The commands so far."""
        return [name for name, _ in self.seen]

    def close(self) -> None:
        """Cut everybody off."""
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), sock, sock.makefile("rb") as source:
            while line := source.readline():
                words = []
                for _ in range(int(line[1:])):
                    length = int(source.readline()[1:])
                    words.append(source.read(length + 2)[:-2])
                if words[-1].startswith(MAGIC):
                    words[-1:] = unpack_keys(words[-1])
                self.seen.append((words[0], words[1:]))
                answer = self._hook(words[0], words[1:])
                sock.sendall(self._obey(words[0], words[1:]) if answer is None else answer)

    def _obey(self, name: bytes, args: list[bytes]) -> bytes:
        if name == b"SET":
            self.values[args[0]] = args[1]
            return b"+OK\r\n"
        if name == b"GET":
            value = self.values.get(args[0])
            return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
        if name == b"DEL":
            return b":%d\r\n" % sum(self.values.pop(key, None) is not None for key in args)
        if name == b"KV.EXISTS":
            return b"$%d\r\n%b\r\n" % (len(args), bytes(b"-d"[key in self.values] for key in args))
        if name == b"KV.PIN":
            return b":%d\r\n" % sum(key in self.values for key in args[1:])
        return b"-ERR unknown command '%b'\r\n" % name


class Mover:
    """`Transfers` over rows of its own, with what a test wants to ask of them."""

    def __init__(self, address: str, *, rows: int = 32, row_bytes: int = ROW_BYTES, **settings: Any) -> None:
        connections = settings.pop("connections", 2)
        load, put = settings.pop("load_timeout_seconds", 10.0), settings.pop("put_timeout_seconds", 10.0)
        self.client = StoreClient(address, timeout_seconds=load, max_connections=connections + 2, **settings)
        self.memory = bytearray(rows * row_bytes)
        self.row_bytes = row_bytes
        self.progress = threading.Event()
        self.transfers = Transfers(
            self.client,
            memoryview(self.memory),
            row_bytes,
            connections=connections,
            load_timeout_seconds=load,
            put_timeout_seconds=put,
            progress=self.progress,
        )
        self.ended: dict[int, Finished] = {}

    def row(self, chunk_id: int) -> bytes:
        """What is in a row."""
        return bytes(self.memory[chunk_id * self.row_bytes : (chunk_id + 1) * self.row_bytes])

    def fill(self, chunk_id: int, byte: int) -> bytes:
        """Put something in a row."""
        value = bytes([byte]) * self.row_bytes
        self.memory[chunk_id * self.row_bytes : (chunk_id + 1) * self.row_bytes] = value
        return value

    def take(self) -> None:
        """Note the jobs that ended; none may end twice."""
        for job in self.transfers.finished():
            assert job.job_id not in self.ended, f"job {job.job_id} ended twice"
            self.ended[job.job_id] = job

    def outcomes(self, job_id: int, seconds: float = 30.0) -> list[str]:
        """How the chunks of a job ended, once it has."""
        until(lambda: self.take() or job_id in self.ended, seconds)
        return self.ended[job_id].outcomes

    def close(self) -> None:
        """Orderly."""
        self.transfers.close()
        self.client.close()


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not come within {seconds} s"
        time.sleep(0.002)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """`until`, for tests."""
    return until


@pytest.fixture
def start_store() -> Iterator[Callable[..., StoreServer]]:
    """Starts servers of 4 MiB on free ports; keywords go to `StoreConfig`."""
    servers: list[StoreServer] = []

    def start(**settings: Any) -> StoreServer:
        server = StoreServer(StoreConfig(**{"capacity_bytes": 4 * MIB, "listen": "127.0.0.1:0", **settings}))
        servers.append(server.start())
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def store(start_store: Callable[..., StoreServer]) -> StoreServer:
    """A running store."""
    return start_store()


@pytest.fixture
def client(store: StoreServer) -> Iterator[StoreClient]:
    """A client of `store`."""
    made = StoreClient(store.address, timeout_seconds=10)
    yield made
    made.close()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedStore]]:
    """Starts `ScriptedStore`s."""
    stores: list[ScriptedStore] = []

    def start(hook: Hook = lambda name, args: None) -> ScriptedStore:
        stores.append(ScriptedStore(hook))
        return stores[-1]

    yield start
    for each in stores:
        each.close()


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Mover]]:
    """Starts `Mover`s on a store's address, with deadlines that hold on a machine with other things to do."""
    movers: list[Mover] = []

    def start(address: str, **settings: Any) -> Mover:
        monkeypatch.setattr(puts, "_ASK_SECONDS", settings.get("put_timeout_seconds", 10.0))
        movers.append(Mover(address, **settings))
        return movers[-1]

    yield start
    for each in movers:
        each.close()


@pytest.fixture
def held(gate: threading.Event) -> Hook:
    """Holds every command until `gate` is set, and obeys it then."""

    def hook(command: bytes, args: list[bytes]) -> None:
        gate.wait(60)

    return hook


@pytest.fixture
def silent(gate: threading.Event) -> Hook:
    """Never answers."""

    def hook(command: bytes, args: list[bytes]) -> bytes:
        gate.wait(60)
        return b""

    return hook


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds a script until it is set; set at the end of the test in any case."""
    event = threading.Event()
    yield event
    event.set()
