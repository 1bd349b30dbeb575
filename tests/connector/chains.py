"""Chunks of chains as tests put them, and what the store keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis

from kvhearth.connector.puts import PutItem
from kvhearth.store.client.client import StoreClient
from kvhearth.store.protocol.header import Header
from kvhearth.store.server.server import StoreServer

ROW = 4096
OOM = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"

Hook = Callable[[bytes, list[bytes]], bytes | None]
StartMover = Callable[..., Any]
StartScripted = Callable[..., Any]


def key(number: int) -> bytes:
    """A key as the tier makes them: namespace, block hash, KV group."""
    return b"%032x:" % 7 + number.to_bytes(32, "big") + (0).to_bytes(4, "big")


def chain(length: int, *, first: int = 0, rows: int = 0, **more: Any) -> list[PutItem]:
    """Chunks ``first``.. of a chain, in rows from ``rows`` on."""
    return [
        PutItem(key(at), rows + at - first, key(at - 1) if at else None, at, **more)
        for at in range(first, first + length)
    ]


def put_row(client: StoreClient, number: int, row: bytes) -> None:
    """Another engine puts a chunk."""
    assert client.put(key(number), Header(position=number), row).stored


def raw(client: StoreClient, store: StoreServer, number: int) -> bytes:
    """What the store keeps under a key, header and row."""
    with redis.Redis(port=store.addresses[0].port, socket_timeout=10) as plain:
        value: bytes = plain.get(key(number))
    return value


def overwrite(store: StoreServer, number: int, value: bytes) -> None:
    """Put anything at all under a key."""
    with redis.Redis(port=store.addresses[0].port, socket_timeout=10) as plain:
        plain.set(key(number), value)
