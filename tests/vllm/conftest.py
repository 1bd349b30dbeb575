"""Stores for the tests with the real vLLM, and servers in a store's place that misbehave."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from .servers import StoreProcess, read_reply

LONGEST_FIRST = (
    "test_engine",
    "test_random_workloads",
    "test_router",
    "test_store_faults",
    "test_versions",
    "test_conformance_tiers",
    "test_up",
    "test_tiny_models",
)
"""Files by how long they take: one that starts an engine last would leave the other worker idle for minutes. Those that
start engines alternate with those that do not."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, each in its own order; xdist keeps it with ``--no-loadscope-reorder``."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    process = StoreProcess()
    process.start()
    yield process
    process.kill()


@pytest.fixture
def fake_store() -> Iterator[Callable[[Callable[[list[bytes]], bytes | None]], str]]:
    """Start a server that answers each command with what a function says (None: nothing at all); gives its address."""
    listeners: list[socket.socket] = []
    clients: list[socket.socket] = []

    def serve(sock: socket.socket, answer: Callable[[list[bytes]], bytes | None]) -> None:
        with contextlib.suppress(OSError, ValueError), sock.makefile("rb") as stream:
            while command := read_reply(stream):
                reply = answer(command)
                if reply is not None:
                    sock.sendall(reply)

    def accept(listener: socket.socket, answer: Callable[[list[bytes]], bytes | None]) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                clients.append(sock)
                threading.Thread(target=serve, args=(sock, answer), daemon=True).start()

    def start(answer: Callable[[list[bytes]], bytes | None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threading.Thread(target=accept, args=(listener, answer), daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for sock in listeners + clients:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
