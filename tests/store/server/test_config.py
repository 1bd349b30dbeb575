"""Settings that cannot work are refused at the border, by name."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvhearth.errors import UserError
from kvhearth.store.client.client import StoreClient
from kvhearth.store.protocol.header import Header
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

MIB = 2**20


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"listen": None}, "listen: nowhere to listen"),
        (
            {"listen": "0.0.0.0:1"},
            "listen: 0.0.0.0:1 can be reached from other machines and there is no password; set users_file",
        ),
        ({"listen": "[::]:1"}, "can be reached from other machines"),
        ({"listen": "unix:/s"}, "listen: unix:/s is not a TCP address"),
        ({"listen": "bad"}, "listen: 'bad' is not an address"),
        (
            {"http_listen": "0.0.0.0:1"},
            "http_listen: 0.0.0.0:1 can be reached from other machines and there is no pass",
        ),
        ({"http_listen": "unix:/s"}, "http_listen: unix:/s is not a TCP address"),
        ({"password": ""}, "password: the password is empty"),
        ({"capacity_bytes": MIB - 1}, "capacity: 1048575 bytes is too little; give at least 1MiB"),
        ({"max_value_bytes": 5 * MIB}, "max_value: 5242880 bytes do not fit a store of 8 MiB; give at most"),
        ({"max_value_bytes": -1}, "max_value: -1"),
        ({"max_connections": 0}, "max_connections: 0 is too few; give at least 1"),
        ({"disk_reserve_bytes": -1}, "disk_reserve: -1 is too few; give at least 0"),
        (
            {"default_ttl_seconds": 60, "disk": Path("/d"), "disk_capacity_bytes": MIB},
            "default_ttl_seconds: values with an end stay in memory",
        ),
        ({"policy": "mru"}, "policy: 'mru' is not known; one of"),
        ({"max_items": -1}, "max_items: -1 is too few"),
        ({"idle_timeout_seconds": 0}, "idle_timeout_seconds: 0 is out of range"),
        ({"stall_timeout_seconds": float("nan")}, "stall_timeout_seconds: nan is out of range"),
    ],
)
def test_what_cannot_work_is_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as refused:
        StoreConfig(**{"capacity_bytes": 8 * MIB, **settings})
    assert str(refused.value).startswith(complaint) or complaint in str(refused.value)


@pytest.mark.parametrize("how", [{"password": "p"}, {"users_file": Path("/u")}, {"insecure": True}])
def test_beyond_loopback_with_logins_or_where_it_is_asked_for_is_fine(how: dict[str, Any]) -> None:
    StoreConfig(capacity_bytes=8 * MIB, listen="0.0.0.0:1", http_listen="0.0.0.0:2", **how)


def test_the_password_is_never_shown() -> None:
    assert "hush" not in repr(StoreConfig(capacity_bytes=8 * MIB, unix=Path("/s"), password="hush"))


def test_room_in_values_is_what_a_real_server_holds() -> None:
    config = StoreConfig(capacity_bytes=2**20, listen="127.0.0.1:0", max_items=100_000)
    row = b"x" * 3000
    with StoreServer(config) as server, closing(StoreClient(server.address)) as client:
        for number in range(2 * config.values_held(len(row))):
            assert client.put(b"key-%d" % number, Header(), row).stored
        held = server.store.table.stats().items
    assert held == config.values_held(len(row))
