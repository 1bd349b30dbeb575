"""Questions about what a node holds, on real stores and a real Redis."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.store.client.admin import Admin
from kvhearth.store.client.client import Put, StoreClient
from kvhearth.store.dram.shares import namespace_of
from kvhearth.store.protocol.header import HEADER_BYTES, Header
from kvhearth.store.server.server import StoreServer

SECONDS = 10.0


@pytest.fixture(params=["ours", "redis"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A running store, and a Redis."""
    if request.param == "ours":
        yield request.getfixturevalue("store").address
        return
    path = tmp_path / "redis"
    command = [request.getfixturevalue("redis_server_binary"), "--port", "0", "--unixsocket", str(path), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path)
    try:
        give_up = time.monotonic() + SECONDS
        while not path.exists():
            assert time.monotonic() < give_up
            time.sleep(0.02)
        yield f"unix:{path}"
    finally:
        process.kill()
        process.wait()


def fill(address: str, keys: list[bytes], row: bytes = b"x" * 100) -> None:
    with closing(StoreClient(address, timeout_seconds=SECONDS)) as client:
        assert all(result.stored for result in client.put_many([Put(key, Header(), row) for key in keys]))


def test_every_key_is_listed_once_in_pages(address: str) -> None:
    keys = [b"ns:%d" % number for number in range(2500)]
    fill(address, keys, b"")
    with Admin(address, timeout_seconds=SECONDS) as admin:
        pages = list(admin.pages())
        assert admin.count() == 2500
    assert sorted(key for page in pages for key in page) == sorted(keys)
    assert len(pages) > 1


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.text("ab*?[]\\^-!", min_size=1, max_size=4), min_size=1, max_size=6, unique=True))
def test_a_namespace_is_taken_by_its_name_not_as_a_pattern(address: str, names: list[str]) -> None:
    with Admin(address, timeout_seconds=SECONDS) as admin:
        admin.clear()
        fill(address, [f"{name}:{number}".encode() for name in names for number in range(2)])
        for name in names:
            listed = sorted(key for page in admin.pages(name) for key in page)
            assert listed == [f"{name}:0".encode(), f"{name}:1".encode()]
            assert {namespace_of(key) for key in listed} == {name.encode()}


def test_lengths_are_told_and_keys_deleted(address: str) -> None:
    fill(address, [b"a", b"b"])
    with Admin(address, timeout_seconds=SECONDS) as admin:
        assert admin.lengths([b"a", b"none"]) == [(b"a", HEADER_BYTES + 100), (b"none", 0)]
        assert admin.delete([b"a", b"none"]) == 1
        assert admin.delete([]) == 0
        assert admin.count() == 1
        admin.clear()
        assert admin.count() == 0
        assert admin.stats()


def test_what_is_refused_is_told_in_the_servers_words(start_store: Callable[..., StoreServer]) -> None:
    store = start_store(password="hunter2")
    said = []
    for password in (None, "wrong2"):
        with (
            closing(Admin(store.address, timeout_seconds=SECONDS, password=password, where="--address")) as admin,
            pytest.raises(UserError, match=r"--address: 127\S+ refuses: .*; give a user and password") as refused,
        ):
            admin.stats()
        said.append(str(refused.value))
    assert "NOAUTH" in said[0]
    assert "WRONGPASS" in said[1]
    assert not re.search("hunter2|wrong2", " ".join(said))
    with Admin(store.address, timeout_seconds=SECONDS, password="hunter2") as admin:
        assert admin.count() == 0


def test_no_answer_is_told_within_the_deadline(fake_store: Callable[..., object]) -> None:
    silent = fake_store(lambda sock: sock.recv(1000) and sock.recv(1000))
    for address, reason in ((silent.address, "timeout"), ("127.0.0.1:1", "unreachable")):  # type: ignore[attr-defined]
        with Admin(address, timeout_seconds=0.2) as admin, pytest.raises(UserError) as none:
            admin.count()
        assert f"no answer from {address} ({reason}" in str(none.value)
        assert "start it with 'kvhearth store serve'" in str(none.value)
