"""The HTTP port beside the store."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from kvhearth.errors import UserError
from kvhearth.metrics import parse_exposition
from kvhearth.store.server import StoreServer

SECONDS = 10.0


def test_health_and_metrics(start_store: Callable[..., StoreServer]) -> None:
    store = start_store(metrics_listen="127.0.0.1:0")
    base = f"http://{store.metrics_address}"
    with urllib.request.urlopen(f"{base}/health", timeout=SECONDS) as answer:
        assert (answer.status, answer.read()) == (200, b'{"status": "ok"}\n')
    with urllib.request.urlopen(f"{base}/metrics", timeout=SECONDS) as answer:
        page = parse_exposition(answer.read().decode())
    assert page["kvhearth_store_capacity_bytes"][()] == 8 * 2**20
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{base}/values", timeout=SECONDS)


def test_clients_that_say_nothing_do_not_take_it_down_for_ever(start_store: Callable[..., StoreServer]) -> None:
    store = start_store(metrics_listen="127.0.0.1:0")
    assert store.metrics_address is not None
    address = (store.metrics_address.host, store.metrics_address.port)
    silent = [socket.create_connection(address, SECONDS) for _ in range(8)]
    with socket.create_connection(address, SECONDS) as ninth:
        ninth.settimeout(SECONDS)
        assert ninth.recv(100) == b""
    for sock in silent:
        sock.close()


def test_clients_that_send_drop_by_drop_lose_their_place(
    start_store: Callable[..., StoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhearth.store.sidecar._REQUEST_SECONDS", 0.3)
    store = start_store(metrics_listen="127.0.0.1:0")
    assert store.metrics_address is not None
    address = (store.metrics_address.host, store.metrics_address.port)
    slow = [socket.create_connection(address, SECONDS) for _ in range(8)]
    left, give_up = set(slow), time.monotonic() + SECONDS
    while left:
        assert time.monotonic() < give_up
        for sock in list(left):
            try:
                sock.sendall(b"G")
            except ConnectionError:
                left.discard(sock)
        time.sleep(0.05)
    with urllib.request.urlopen(f"http://{store.metrics_address}/health", timeout=SECONDS) as answer:
        assert answer.status == 200
    for sock in slow:
        sock.close()


def test_a_taken_port_is_named(start_store: Callable[..., StoreServer]) -> None:
    taken = start_store(metrics_listen="127.0.0.1:0").metrics_address
    with pytest.raises(UserError, match=f"metrics_listen: {taken} is already in use"):
        start_store(metrics_listen=str(taken))
