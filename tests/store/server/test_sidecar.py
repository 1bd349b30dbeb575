"""The HTTP port beside the store."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from kvhearth.errors import UserError
from kvhearth.metrics import Registry, parse_exposition
from kvhearth.store.protocol.address import parse_address
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer
from kvhearth.store.server.sidecar import Readiness, Sidecar

SECONDS = 10.0


def test_health_readiness_and_metrics(start_store: Callable[..., StoreServer]) -> None:
    store = start_store(http_listen="127.0.0.1:0")
    base = f"http://{store.http_address}"
    with urllib.request.urlopen(f"{base}/healthz", timeout=SECONDS) as answer:
        assert (answer.status, answer.read()) == (200, b'{"status": "ok"}\n')
    with urllib.request.urlopen(f"{base}/readyz", timeout=SECONDS) as answer:
        assert (answer.status, json.load(answer)) == (200, {"status": "ready", "tiers": {"dram": "up"}})
    with urllib.request.urlopen(f"{base}/metrics", timeout=SECONDS) as answer:
        page = parse_exposition(answer.read().decode())
    assert page["kvhearth_store_capacity_bytes"][()] == 8 * 2**20
    for path in ("values", "health", "metrics/", ""):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}/{path}", timeout=SECONDS)


def test_a_store_that_takes_its_memory_lives_and_is_not_ready(start_store: Callable[..., StoreServer]) -> None:
    seen: list[tuple[int, int]] = []
    free = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
    free.close()

    def ask(_done: int, _total: int) -> None:
        if not seen:
            with urllib.request.urlopen(f"http://{address}/healthz", timeout=SECONDS) as answer:
                alive = answer.status
            with pytest.raises(urllib.error.HTTPError) as starting:
                urllib.request.urlopen(f"http://{address}/readyz", timeout=SECONDS)
            with starting.value as refused:
                assert json.load(refused)["status"] == "starting"
            seen.append((alive, starting.value.code))

    config = StoreConfig(capacity_bytes=8 * 2**20, listen="127.0.0.1:0", http_listen=address)
    with StoreServer(config, ask), urllib.request.urlopen(f"http://{address}/readyz", timeout=SECONDS) as answer:
        assert answer.status == 200
    assert seen == [(200, 503)]


def test_a_tier_that_is_down_is_told_and_leaves_the_store_ready(
    start_store: Callable[..., StoreServer], tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    store = start_store(http_listen="127.0.0.1:0", disk=volume / "kv", disk_capacity_bytes=2**30)

    def tiers() -> dict[str, str]:
        with urllib.request.urlopen(f"http://{store.http_address}/readyz", timeout=SECONDS) as answer:
            told = json.load(answer)
        assert (answer.status, told["status"], told["tiers"]["dram"]) == (200, "ready", "up")
        return dict(told["tiers"])

    assert wait_for(lambda: tiers()["disk"], "down")
    volume.mkdir()  # mounted at last
    assert wait_for(lambda: tiers()["disk"], "up")


def test_a_tier_whose_index_is_not_whole_yet_is_told() -> None:
    sidecar = Sidecar(parse_address("127.0.0.1:0"), Registry(), lambda: Readiness(True, {"disk": "rebuilding"}))
    sidecar.start()
    try:
        with urllib.request.urlopen(f"http://{sidecar.address}/readyz", timeout=SECONDS) as answer:
            assert (answer.status, json.load(answer)["tiers"]) == (200, {"disk": "rebuilding"})
    finally:
        sidecar.stop()


def wait_for(look: Callable[[], str], wanted: str) -> bool:
    """Whether ``look`` tells ``wanted`` in time."""
    give_up = time.monotonic() + SECONDS
    while look() != wanted:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


def test_clients_that_say_nothing_do_not_take_it_down_for_ever(start_store: Callable[..., StoreServer]) -> None:
    store = start_store(http_listen="127.0.0.1:0")
    assert store.http_address is not None
    address = (store.http_address.host, store.http_address.port)
    silent = [socket.create_connection(address, SECONDS) for _ in range(8)]
    with socket.create_connection(address, SECONDS) as ninth:
        ninth.settimeout(SECONDS)
        assert ninth.recv(100) == b""
    for sock in silent:
        sock.close()


def test_clients_that_send_drop_by_drop_lose_their_place(
    start_store: Callable[..., StoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhearth.store.server.sidecar._REQUEST_SECONDS", 0.3)
    store = start_store(http_listen="127.0.0.1:0")
    assert store.http_address is not None
    address = (store.http_address.host, store.http_address.port)
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
    with urllib.request.urlopen(f"http://{store.http_address}/healthz", timeout=SECONDS) as answer:
        assert answer.status == 200
    for sock in slow:
        sock.close()


def test_a_taken_port_is_named(start_store: Callable[..., StoreServer]) -> None:
    taken = start_store(http_listen="127.0.0.1:0").http_address
    with pytest.raises(UserError, match=f"http_listen: {taken} is already in use"):
        start_store(http_listen=str(taken))
