"""Stores for the tests with the real vLLM, and servers in a store's place that misbehave."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from .servers import StoreProcess, read_reply


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
