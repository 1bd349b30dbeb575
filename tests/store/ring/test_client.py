"""A ring of stores as one: rows on their nodes, copies, nodes that fail, come back, come and go."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.metrics import Registry, parse_exposition
from kvhearth.store.client.client import Put, StoreClient
from kvhearth.store.client.outcomes import MissReason
from kvhearth.store.open import open_store
from kvhearth.store.protocol.header import Header
from kvhearth.store.ring.client import StoreRing
from kvhearth.store.ring.members import Members
from kvhearth.store.ring.placement import Ring
from kvhearth.store.ring.repair import Repairs
from kvhearth.store.server.server import StoreServer

SECONDS = 10.0
SLACK_SECONDS = 5.0
KEYS = [b"ns:%06d" % number for number in range(90)]

StartStore = Callable[..., StoreServer]
Dial = Callable[..., StoreRing]


def stamped(key: bytes) -> bytes:
    """A row that could belong to no other key."""
    return key * (20 + key[-1] % 16)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(0.02)


def fill(ring: StoreRing | StoreClient, keys: list[bytes]) -> int:
    """Put stamped rows; how many were stored."""
    return sum(result.stored for result in ring.put_many([Put(key, Header(position=3), stamped(key)) for key in keys]))


def read(ring: StoreRing, keys: list[bytes], timeout_seconds: float | None = None) -> list[MissReason | None]:
    """Get rows, each of which must be its key's own; why each did not come."""
    buffers = [bytearray(1000) for _ in keys]
    started = time.monotonic()
    results = ring.get_many_into(keys, buffers, timeout_seconds=timeout_seconds)
    assert time.monotonic() - started < (SECONDS if timeout_seconds is None else timeout_seconds) + SLACK_SECONDS
    for key, buffer, result in zip(keys, buffers, results, strict=True):
        if result.hit:
            assert buffer[: result.nbytes] == stamped(key)
            assert result.header is not None
            assert result.header.position == 3
    return [result.reason for result in results]


def hits(ring: StoreRing, keys: list[bytes], timeout_seconds: float | None = None) -> int:
    return sum(reason is None for reason in read(ring, keys, timeout_seconds))


def held(node: StoreServer) -> int:
    """Values that a node holds."""
    with contextlib.closing(StoreClient(node.address, timeout_seconds=SECONDS)) as client:
        return int(client.stats().get("db0", "keys=0,").removeprefix("keys=").partition(",")[0])


def connected(node: StoreServer) -> int:
    """Clients of a node."""
    page = parse_exposition(node.registry.expose().decode())
    return int(page["kvhearth_store_connections"][()])


@pytest.fixture
def nodes(start_store: StartStore) -> list[StoreServer]:
    """Three stores."""
    return [start_store() for _ in range(3)]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Makes rings, and closes them."""
    made: list[StoreRing] = []

    def dial(address: str | list[StoreServer], **settings: Any) -> StoreRing:
        text = address if isinstance(address, str) else ",".join(node.address for node in address)
        ring = open_store(text, **{"timeout_seconds": SECONDS, **settings})
        assert isinstance(ring, StoreRing)
        made.append(ring)
        return ring

    yield dial
    for ring in made:
        ring.close()


def dead_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


class TestOneOfMany:
    @pytest.mark.parametrize("copies", [1, 2])
    def test_rows_are_spread_and_come_back(self, nodes: list[StoreServer], dial: Dial, copies: int) -> None:
        ring = dial(nodes, copies=copies)
        assert fill(ring, KEYS) == len(KEYS)
        assert hits(ring, [*KEYS, b"absent"]) == len(KEYS)
        numbers = [held(node) for node in nodes]
        assert sum(numbers) == copies * len(KEYS)
        assert min(numbers) > 0
        names = Ring(node.address for node in nodes)
        for node in nodes:
            with contextlib.closing(StoreClient(node.address)) as client:
                there = client.exists_many(KEYS)
            assert there == [node.address in names.owners(key, copies) for key in KEYS]
        assert ring.counts["get", "ok"] == ring.counts["put", "ok"] == len(KEYS)
        assert ring.counts["get", "absent"] == 1

    @pytest.mark.parametrize("copies", [1, 2])
    def test_questions_and_orders_reach_every_node(self, nodes: list[StoreServer], dial: Dial, copies: int) -> None:
        ring = dial(nodes, copies=copies)
        fill(ring, KEYS[:60])
        assert ring.match(KEYS) == 60
        assert ring.match_tiers(KEYS[50:]) == b"d" * 10
        assert ring.match([b"absent", *KEYS]) == ring.match([]) == 0
        assert ring.exists_many(KEYS) == [True] * 60 + [False] * 30
        assert ring.where(KEYS[59:61]) == b"d-"
        assert ring.exists(KEYS[0])
        assert ring.prefetch(KEYS) == 60
        assert ring.pin(KEYS) == 60
        assert ring.unpin(KEYS[:10]) == 10
        assert ring.delete(KEYS[0])
        assert not ring.delete(KEYS[0])
        assert ring.delete_many(KEYS)
        assert sum(held(node) for node in nodes) == 0
        assert ring.ping() is None
        assert set(ring.nodes.values()) == {True}
        assert {name.partition("/")[0] for name in ring.stats()} == {node.address for node in nodes}

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data(), length=st.integers(0, 40), copies=st.integers(1, 2))
    def test_leading_hits_are_those_of_the_whole_chain_wherever_its_chunks_are(
        self, nodes: list[StoreServer], data: st.DataObject, length: int, copies: int
    ) -> None:
        chain = KEYS[:length]
        present = data.draw(st.lists(st.integers(0, 9).map(bool), min_size=length, max_size=length))
        with contextlib.closing(open_store(",".join(node.address for node in nodes), copies=copies)) as ring:
            assert ring.delete_many(KEYS)
            fill(ring, [key for key, there in zip(chain, present, strict=True) if there])
            leading = present.index(False) if False in present else length
            assert ring.match(chain) == len(ring.match_tiers(chain)) == leading
            assert ring.exists_many(chain) == present

    def test_case_2_a_row_that_went_between_lookup_and_get_is_a_miss(
        self, nodes: list[StoreServer], dial: Dial
    ) -> None:
        ring = dial(nodes)
        fill(ring, KEYS)
        assert ring.match(KEYS) == len(KEYS)
        with contextlib.closing(StoreClient(nodes[1].address)) as client:
            gone = client.exists_many(KEYS)
            client.delete_many(KEYS)
        assert [reason is MissReason.ABSENT for reason in read(ring, KEYS)] == gone
        assert ring.counts["get", "absent"] == sum(gone) > 0

    def test_a_ring_takes_every_call_that_a_node_takes(self) -> None:
        for name, call in inspect.getmembers(StoreClient, inspect.isfunction):
            if not name.startswith("_"):
                assert inspect.signature(getattr(StoreRing, name)) == inspect.signature(call), name
        properties = [name for name, value in vars(StoreClient).items() if isinstance(value, property)]
        assert all(isinstance(getattr(StoreRing, name), property) for name in properties)

    def test_records(self, nodes: list[StoreServer], dial: Dial) -> None:
        ring = dial(nodes, copies=2)
        assert ring.put_record(b"pool", b"{}").stored
        assert ring.get_record(b"pool") == (None, b"{}")
        assert ring.get_record(b"absent") == (MissReason.ABSENT, None)
        with pytest.raises(ValueError, match="longer than"):
            ring.put_record(b"pool", bytes(70_000))

    def test_wrong_use_is_told(self, nodes: list[StoreServer], dial: Dial) -> None:
        ring = dial(nodes)
        with pytest.raises(ValueError, match="2 keys and 1 buffers"):
            ring.get_many_into([b"a", b"b"], [bytearray(1)])
        with pytest.raises(ValueError, match="writable"):
            ring.get_into(b"a", bytes(1))
        with pytest.raises(ValueError, match="1 to 512 bytes"):
            ring.match([b""])

    def test_numbers_of_the_ring_are_shown(self, nodes: list[StoreServer], dial: Dial) -> None:
        ring = dial([nodes[0], nodes[1]], copies=2)
        fill(ring, KEYS[:5])
        registry = Registry()
        registry.collect_from(ring.metrics)
        page = parse_exposition(registry.expose().decode())
        assert page["kvhearth_store_ring_nodes"] == {(): 2}
        assert set(page["kvhearth_store_ring_node_up"].values()) == {1}
        calls = page["kvhearth_store_ring_node_calls_total"]
        for node in nodes[:2]:
            assert calls[("node", node.address), ("operation", "put"), ("outcome", "ok")] == 5
        assert page["kvhearth_store_client_calls_total"][("operation", "put"), ("outcome", "ok")] == 5


class TestCopies:
    def test_what_the_first_node_lacks_comes_from_the_second_and_is_put_back(
        self, nodes: list[StoreServer], dial: Dial
    ) -> None:
        ring = dial(nodes, copies=2)
        fill(ring, KEYS)
        with contextlib.closing(StoreClient(nodes[0].address)) as client:
            had = client.exists_many(KEYS)
            first = Ring(node.address for node in nodes)
            lost = [key for key in KEYS if first.owners(key)[0] == nodes[0].address]
            assert client.delete_many(KEYS)
            assert ring.match(KEYS) == len(KEYS)
            assert ring.match_tiers(KEYS) == b"d" * len(KEYS)
            assert hits(ring, KEYS) == len(KEYS)
            wait_until(lambda: client.exists_many(lost) == [True] * len(lost))
        assert 0 < len(lost) < sum(had)
        assert hits(ring, KEYS) == len(KEYS)

    def test_case_2_another_keys_bytes_are_a_miss_and_the_other_copy_is_taken(
        self, nodes: list[StoreServer], dial: Dial
    ) -> None:
        ring = dial(nodes, copies=2)
        fill(ring, KEYS[:10])
        names = Ring(node.address for node in nodes)
        for key in KEYS[:10]:
            host, port = names.owners(key)[0].split(":")
            with socket.create_connection((host, int(port)), 5) as sock:  # another key's row in its place
                with contextlib.closing(StoreClient(f"{host}:{port}")) as client:
                    client.put(b"other", Header(position=3), stamped(b"other"))
                sock.sendall(b"*2\r\n$3\r\nGET\r\n$5\r\nother\r\n")
                value = sock.recv(65536).partition(b"\r\n")[2][:-2]
                sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(value), value))
                assert sock.recv(100) == b"+OK\r\n"
        assert hits(ring, KEYS[:10]) == 10

    def test_a_record_is_not_put_back_as_it_may_have_changed(self, nodes: list[StoreServer], dial: Dial) -> None:
        ring = dial(nodes, copies=2)
        ring.put_record(b"pool", b"new")
        first = Ring(node.address for node in nodes).owners(b"pool")[0]
        with contextlib.closing(StoreClient(first)) as client:
            client.delete(b"pool")
            assert ring.get_record(b"pool").record == b"new"
            fill(ring, KEYS)
            assert not client.exists(b"pool")

    def test_a_put_is_stored_when_one_copy_is_and_the_other_is_counted(
        self, nodes: list[StoreServer], dial: Dial
    ) -> None:
        ring = dial(f"{nodes[0].address},{dead_address()}", copies=2)
        for _ in range(6):  # also once the other node is passed over
            assert fill(ring, KEYS[:4]) == 4
        registry = Registry()
        registry.collect_from(ring.metrics)
        assert parse_exposition(registry.expose().decode())["kvhearth_store_ring_copies_lost_total"] == {(): 24}

    def test_rows_to_be_put_back_are_bounded(self, nodes: list[StoreServer]) -> None:
        repairs = Repairs(max_waiting_bytes=10_000)
        row = memoryview(bytes(9000))
        with contextlib.closing(StoreClient(nodes[0].address)) as client:
            repairs.put(client, b"too large", Header(), memoryview(bytes(20_000)))
            assert repairs.counts["dropped"] == 1
            repairs.put(client, b"fits", Header(), row)
            wait_until(lambda: repairs.counts["ok"] == 1)
            wait_until(lambda: client.exists(b"fits"))
            repairs.close()
            repairs.put(client, b"late", Header(), row)
            assert repairs.counts == {"ok": 1, "failed": 0, "dropped": 2}


class TestFailures:
    def test_case_2_every_node_is_dead_at_start(self, dial: Dial) -> None:
        ring = dial(f"{dead_address()},{dead_address()}")
        for _ in range(4):
            assert read(ring, KEYS[:8]) != [None] * 8
        assert ring.is_down
        assert not any(ring.nodes.values())
        assert fill(ring, KEYS[:2]) == ring.match(KEYS) == ring.pin(KEYS) == 0
        assert ring.exists_many(KEYS[:2]) == [False, False]
        assert not ring.delete_many(KEYS)
        assert ring.ping() is not None
        assert ring.stats() == {}

    def test_after_close_calls_miss(self, nodes: list[StoreServer], dial: Dial) -> None:
        ring = dial(nodes)
        fill(ring, KEYS)
        ring.close()
        assert read(ring, KEYS) == [MissReason.UNREACHABLE] * len(KEYS)
        assert fill(ring, KEYS) == ring.match(KEYS) == 0

    def test_a_node_that_is_gone_costs_its_keys_once_with_one_copy(self, nodes: list[StoreServer], dial: Dial) -> None:
        ring = dial(nodes, copies=1)
        fill(ring, KEYS)
        gone = nodes[0].address
        names = Ring(node.address for node in nodes)
        theirs = [key for key in KEYS if names.owners(key) == (gone,)]
        nodes[0].stop()
        wait_until(lambda: hits(ring, KEYS) == len(KEYS) - len(theirs) and not ring.nodes[gone])
        assert not ring.is_down
        assert read(ring, theirs) == [MissReason.ABSENT] * len(theirs)
        assert fill(ring, theirs) == len(theirs)  # on the next node in each key's order
        assert hits(ring, KEYS) == ring.match(KEYS) == len(KEYS)

    def test_a_node_that_is_gone_costs_nothing_with_two_copies(self, nodes: list[StoreServer], dial: Dial) -> None:
        ring = dial(nodes, copies=2)
        fill(ring, KEYS)
        nodes[0].stop()
        for _ in range(5):
            assert hits(ring, KEYS) == ring.match(KEYS) == sum(ring.exists_many(KEYS)) == len(KEYS)

    def test_a_node_that_came_back_empty_finds_its_keys_where_they_went(
        self, nodes: list[StoreServer], start_store: StartStore, dial: Dial
    ) -> None:
        ring = dial(nodes, copies=1)
        gone = nodes[0].address
        nodes[0].stop()
        wait_until(lambda: hits(ring, KEYS) == 0 and not ring.nodes[gone])
        assert fill(ring, KEYS) == len(KEYS)
        back = start_store(listen=gone)
        wait_until(lambda: ring.nodes[gone])
        assert hits(ring, KEYS) == ring.match(KEYS) == len(KEYS)
        theirs = [key for key in KEYS if Ring(node.address for node in nodes).owners(key) == (gone,)]
        wait_until(lambda: held(back) == len(theirs))  # put back where they belong

    def silent(self, sock: socket.socket) -> None:
        while sock.recv(65536):
            pass

    def nonsense(self, sock: socket.socket) -> None:
        while sock.recv(65536):
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)

    def dropping(self, sock: socket.socket) -> None:
        sock.recv(65536)
        sock.close()

    def cutting(self, sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(b"$264\r\n" + bytes(100))
        sock.close()

    @pytest.mark.parametrize("behaviour", ["silent", "nonsense", "dropping", "cutting"])
    @pytest.mark.parametrize("copies", [1, 2])
    def test_case_2_a_node_that_gives_no_proper_answer_costs_its_own_keys_only(
        self, nodes: list[StoreServer], dial: Dial, fake_store: Callable[..., Any], behaviour: str, copies: int
    ) -> None:
        fake = fake_store(getattr(self, behaviour))
        names = Ring([fake.address, nodes[0].address, nodes[1].address])
        ring = dial(",".join(names.nodes), copies=copies, timeout_seconds=0.3)
        fill(ring, KEYS)
        theirs = [fake.address in names.owners(key, copies) for key in KEYS]
        found = read(ring, KEYS, timeout_seconds=0.3)
        assert all(reason is None for reason, its in zip(found, theirs, strict=True) if not its)
        if copies == 2:
            assert found == [None] * len(KEYS)
        for _ in range(4):
            read(ring, KEYS, timeout_seconds=0.3)
            assert ring.match(KEYS, timeout_seconds=0.3) <= len(KEYS)
        if behaviour == "silent":
            wait_until(lambda: not ring.nodes[fake.address])
        wait_until(lambda: fill(ring, KEYS) == len(KEYS))
        wait_until(lambda: hits(ring, KEYS, timeout_seconds=0.3) == len(KEYS))

    def test_every_thread_of_a_busy_program_gets_its_own_rows(self, nodes: list[StoreServer], dial: Dial) -> None:
        ring = dial(nodes, copies=2)
        fill(ring, KEYS)
        wrong: list[BaseException] = []

        def work(seed: int) -> None:
            choose = random.Random(seed)
            try:
                for _ in range(15):
                    assert hits(ring, choose.sample(KEYS, 20)) == 20
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []


class TestMembers:
    @pytest.fixture(autouse=True)
    def look_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvhearth.store.ring.members.FILE_SECONDS", 0.1)
        monkeypatch.setattr("kvhearth.store.ring.members.DNS_SECONDS", 0.1)

    def test_a_node_more_takes_its_keys_over_as_they_are_used(
        self, nodes: list[StoreServer], dial: Dial, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "nodes"
        path.write_text(f"{nodes[0].address}\n{nodes[1].address}\n")
        ring = dial(f"file:{path}")
        fill(ring, KEYS)
        path.write_text("\n".join(node.address for node in nodes))
        wait_until(lambda: len(ring.nodes) == 3)
        assert ring.match(KEYS) == len(KEYS)
        assert hits(ring, KEYS) == len(KEYS)
        names = Ring(node.address for node in nodes)
        moved = sum(names.owners(key) == (nodes[2].address,) for key in KEYS)
        wait_until(lambda: held(nodes[2]) == moved > 0)
        path.write_text("# oops")
        wait_until(lambda: "the last 3 known stay" in caplog.text)
        assert hits(ring, KEYS) == len(KEYS)

    def test_after_a_change_only_keys_that_moved_are_asked_for_twice(
        self, nodes: list[StoreServer], dial: Dial, tmp_path: Path
    ) -> None:
        path = tmp_path / "nodes"
        path.write_text(f"{nodes[0].address}\n{nodes[1].address}\n")
        ring = dial(f"file:{path}")
        path.write_text("\n".join(node.address for node in nodes))
        wait_until(lambda: len(ring.nodes) == 3)
        assert read(ring, KEYS) == [MissReason.ABSENT] * len(KEYS)
        registry = Registry()
        registry.collect_from(ring.metrics)
        asked = parse_exposition(registry.expose().decode())["kvhearth_store_ring_node_calls_total"]
        names = Ring(node.address for node in nodes)
        moved = sum(names.owners(key) == (nodes[2].address,) for key in KEYS)
        assert sum(asked.values()) == len(KEYS) + moved

    def test_a_node_less_costs_its_keys_only(self, nodes: list[StoreServer], tmp_path: Path) -> None:
        path = tmp_path / "nodes"
        path.write_text("\n".join(node.address for node in nodes))
        clients: list[StoreClient] = []

        def connect(node: str) -> StoreClient:
            clients.append(StoreClient(node, timeout_seconds=SECONDS))
            return clients[-1]

        with contextlib.closing(StoreRing(Members(f"file:{path}"), connect, timeout_seconds=SECONDS)) as ring:
            fill(ring, KEYS)
            assert sum(ring.exists_many(KEYS)) == len(KEYS)
            path.write_text(f"{nodes[0].address}\n{nodes[2].address}\n")
            wait_until(lambda: len(ring.nodes) == 2)
            left = sum(Ring(node.address for node in nodes).owners(key) != (nodes[1].address,) for key in KEYS)
            assert hits(ring, KEYS) == left
            assert fill(ring, KEYS) == hits(ring, KEYS) == len(KEYS)
            wait_until(lambda: connected(nodes[1]) == 0)
            assert ring.counts["exists", "ok"] == 3  # what a former member answered still counts
        assert len(clients) == 3

    def test_looking_back_ends(self, nodes: list[StoreServer], tmp_path: Path) -> None:
        path = tmp_path / "nodes"
        path.write_text(nodes[0].address)
        ring = StoreRing(Members(f"file:{path}"), StoreClient, look_back_seconds=0.0)
        with contextlib.closing(ring):
            fill(ring, KEYS)
            path.write_text(f"{nodes[0].address}\n{nodes[1].address}\n")
            wait_until(lambda: len(ring.nodes) == 2)
            names = Ring([nodes[0].address, nodes[1].address])
            assert hits(ring, KEYS) == sum(names.owners(key) == (nodes[0].address,) for key in KEYS)

    def test_a_name_with_several_addresses(
        self, start_store: StartStore, dial: Dial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = start_store()
        port = one.addresses[0].port
        two = start_store(listen=f"127.0.0.2:{port}")
        hosts = ["127.0.0.1"]
        real = socket.getaddrinfo

        def resolve(host: str, *args: Any, **more: Any) -> Any:
            if host != "store.test":
                return real(host, *args, **more)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, port)) for found in hosts]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        ring = dial(f"dns:store.test:{port}")
        assert list(ring.nodes) == [one.address]
        hosts.append("127.0.0.2")
        wait_until(lambda: len(ring.nodes) == 2)
        assert fill(ring, KEYS) == hits(ring, KEYS) == len(KEYS)
        assert held(one) + held(two) == len(KEYS)

    def test_a_name_that_does_not_resolve_yet_is_an_empty_ring(
        self, nodes: list[StoreServer], dial: Dial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known: list[str] = []
        real = socket.getaddrinfo

        def resolve(host: str, *args: Any, **more: Any) -> Any:
            if host != "store.test":
                return real(host, *args, **more)
            if not known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0)) for found in known]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        ring = dial(f"dns:store.test:{nodes[0].addresses[0].port}", copies=2)
        assert ring.is_down
        assert read(ring, KEYS[:2]) == [MissReason.UNREACHABLE] * 2
        assert (ring.match(KEYS), ring.pin(KEYS), ring.stats(), ring.delete_many(KEYS)) == (0, 0, {}, False)
        assert fill(ring, KEYS) == 0
        assert ring.ping() is MissReason.UNREACHABLE
        known.append("127.0.0.1")
        wait_until(lambda: not ring.is_down)
        assert fill(ring, KEYS) == hits(ring, KEYS) == len(KEYS)


class TestAddresses:
    def test_one_node_is_no_ring(self, nodes: list[StoreServer]) -> None:
        with contextlib.closing(open_store(nodes[0].address)) as client:
            assert isinstance(client, StoreClient)
            assert client.ping() is None

    @pytest.mark.parametrize("address", ["a:7420,b", "", "a:1,a:1", "file:/does/not/exist"])
    def test_a_bad_address_is_named(self, address: str) -> None:
        with pytest.raises(UserError, match="store"):
            open_store(address, where="store")

    @pytest.mark.parametrize(("address", "copies"), [("a:7420", 2), ("a:7420,b:7420", 3), ("a:7420", 0)])
    def test_copies_that_cannot_be_kept_are_refused(self, address: str, copies: int) -> None:
        with pytest.raises(UserError, match="copies"):
            open_store(address, copies=copies)

    def test_settings_are_those_of_every_nodes_client(self, start_store: StartStore) -> None:
        addresses = ",".join(start_store(password="right").address for _ in range(2))
        with contextlib.closing(open_store(addresses, password="right")) as ring:
            assert fill(ring, KEYS) == len(KEYS)
        with contextlib.closing(open_store(addresses, password="wrong")) as ring:
            assert ring.ping() is MissReason.REFUSED


CHILD = """
import sys, threading
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer
with StoreServer(StoreConfig(capacity_bytes=8 << 20, listen=sys.argv[1])):
    threading.Event().wait(120)
"""


class Child:
    """A store as a process of its own, at a fixed address."""

    def __init__(self) -> None:
        self.address = dead_address()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", CHILD, self.address], stderr=subprocess.DEVNULL)

    def ready(self) -> bool:
        host, port = self.address.split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return True
        return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(SECONDS)


class Load:
    """Engines: get what is there, put what is not; every row is checked and every call timed."""

    def __init__(self, ring: StoreRing) -> None:
        self.faults: list[str] = []
        self.rounds = 0
        self._ring = ring
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(seed,)) for seed in range(4)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            if thread.is_alive():
                self.faults.append("a call hangs")

    def _work(self, seed: int) -> None:
        choose = random.Random(seed)
        try:
            while not self._stop.is_set():
                keys = choose.sample(KEYS, 8)
                missed = [key for key, reason in zip(keys, read(self._ring, keys, 1.0), strict=True) if reason]
                fill(self._ring, missed)
                self._ring.match(keys)
                self.rounds += 1
                time.sleep(0.01)  # leave the machine to the stores
        except BaseException as error:
            self.faults.append(repr(error))


@pytest.fixture(scope="module")
def children() -> Iterator[list[Child]]:
    """Three stores that can be killed."""
    made = [Child() for _ in range(3)]
    try:
        for child in made:
            child.start()
        wait_until(lambda: all(child.ready() for child in made), 60)
        yield made
    finally:
        for child in made:
            child.kill()


@pytest.mark.parametrize("copies", [1, 2])
def test_case_2_a_node_killed_under_load_and_restarted_costs_hits_and_nothing_else(
    children: list[Child], dial: Dial, copies: int
) -> None:
    ring = dial(",".join(child.address for child in children), copies=copies, timeout_seconds=1.0)
    assert fill(ring, KEYS) == hits(ring, KEYS) == len(KEYS)
    load = Load(ring)
    try:
        children[0].kill()
        if copies == 2:
            for _ in range(3):
                assert hits(ring, KEYS) == len(KEYS)
        else:
            wait_until(lambda: hits(ring, KEYS) == len(KEYS))
        children[0].start()
        wait_until(lambda: children[0].ready() and all(ring.nodes.values()), 60)
        wait_until(lambda: hits(ring, KEYS) == ring.match(KEYS) == len(KEYS))
    finally:
        load.stop()
    assert load.faults == []
    assert load.rounds > 0


def test_case_2_keys_are_found_by_a_process_with_another_hash_seed(nodes: list[StoreServer], dial: Dial) -> None:
    ring = dial(nodes)
    fill(ring, KEYS)
    addresses = ",".join(node.address for node in reversed(nodes))
    script = f"from kvhearth.store.open import open_store; print(open_store({addresses!r}).match({KEYS!r}))"
    environment = {**os.environ, "PYTHONHASHSEED": "11"}
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True, timeout=60)
    assert int(out.stdout) == len(KEYS)
