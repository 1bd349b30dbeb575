"""A StoreClient that copies rows out of and into the store's memory by itself, on real servers, one of them a child
process that is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhearth.store.client.client import Put, StoreClient
from kvhearth.store.client.outcomes import MissReason
from kvhearth.store.client.transfers import SHARED_FROM_BYTES
from kvhearth.store.protocol.header import Header
from kvhearth.store.server.server import StoreServer

MIB = 2**20
SECONDS = 10.0
ROW_BYTES = 200_000

Dial = Callable[..., StoreClient]


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up, "it did not come to pass"
        time.sleep(0.01)


def row_of(key: bytes, nbytes: int = ROW_BYTES) -> bytes:
    """A row stamped with its key all through."""
    return (key * (nbytes // len(key) + 1))[:nbytes]


def put(client: StoreClient, keys: list[bytes], nbytes: int = ROW_BYTES) -> list[MissReason | None]:
    puts = [Put(key, Header(position=place), row_of(key, nbytes)) for place, key in enumerate(keys)]
    return [result.reason for result in client.put_many(puts)]


def get(client: StoreClient, keys: list[bytes], nbytes: int = ROW_BYTES) -> list[MissReason | None]:
    """Reasons; every hit has the row that belongs to its key."""
    buffers = [bytearray(nbytes) for _ in keys]
    results = client.get_many_into(keys, buffers)
    for key, buffer, result in zip(keys, buffers, results, strict=True):
        assert not result.hit or buffer == row_of(key, nbytes)
    return [result.reason for result in results]


def moved(client: StoreClient) -> dict[tuple[str, str], int]:
    return client._tally.moved_bytes


def maps(name: str = "kvhearth-store") -> int:
    """Mappings of stores' memory in this process."""
    return sum(f"memfd:{name}" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def dial() -> Iterator[Dial]:
    made: list[StoreClient] = []

    def connect(server: StoreServer | str, **settings: Any) -> StoreClient:
        address = server
        if isinstance(server, StoreServer):
            address = next(str(found) for found in server.addresses if found.is_unix)
        made.append(StoreClient(str(address), **{"timeout_seconds": SECONDS, **settings}))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def shared(start_store: Callable[..., StoreServer], tmp_path: Path) -> StoreServer:
    return start_store(unix=tmp_path / "s", listen="127.0.0.1:0", capacity_bytes=16 * MIB)


class TestRows:
    def test_rows_go_and_come_through_shared_memory_and_are_the_same_over_tcp(
        self, shared: StoreServer, dial: Dial
    ) -> None:
        client, tcp = dial(shared), dial(shared.address)
        keys = [b"key-%02d" % number for number in range(20)]
        assert put(client, keys) == [None] * 20
        assert get(client, keys) == get(tcp, keys) == [None] * 20
        assert moved(client) == {("shared", "put"): 20 * ROW_BYTES, ("shared", "get"): 20 * ROW_BYTES}
        assert moved(tcp) == {("tcp", "get"): 20 * ROW_BYTES}
        assert put(tcp, [b"tcp"]) == [None]
        assert get(client, [b"tcp", b"nothing", b"key-03"]) == [None, MissReason.ABSENT, None]
        assert client.counts == {("put", "ok"): 20, ("get", "ok"): 22, ("get", "absent"): 1}

    def test_headers_come_back(self, shared: StoreServer, dial: Dial) -> None:
        client, header = dial(shared), Header(position=7, parent=8, recompute_ns=9, group=10, epoch=11)
        client.put(b"k", header, row_of(b"k"))
        found = client.get_into(b"k", bytearray(ROW_BYTES)).header
        assert found is not None
        assert found._replace(payload_bytes=0, checksum=header.checksum) == header

    def test_short_rows_and_records_travel_over_the_socket(self, shared: StoreServer, dial: Dial) -> None:
        client = dial(shared)
        assert put(client, [b"k"], SHARED_FROM_BYTES) == [None]
        assert client.put_record(b"r", b"record").stored
        assert client.get_record(b"r").record == b"record"
        assert moved(client) == {("unix", "put"): SHARED_FROM_BYTES + 6, ("unix", "get"): 6}

    def test_rows_of_any_length_in_buffers_that_are_longer(self, shared: StoreServer, dial: Dial) -> None:
        client = dial(shared)
        lengths = [0, 1, 511, 4096, 100_000, MIB]
        puts = [Put(b"%d" % n, Header(), row_of(b"%d" % n, n)) for n in lengths]
        assert all(result.stored for result in client.put_many(puts))
        buffers = [bytearray(MIB + 5) for _ in lengths]
        results = client.get_many_into([b"%d" % n for n in lengths], buffers)
        assert [result.nbytes for result in results] == lengths
        assert all(buffer[:n] == row_of(b"%d" % n, n) for n, buffer in zip(lengths, buffers, strict=True))

    def test_a_buffer_that_is_too_short_and_a_value_that_is_no_row(self, shared: StoreServer, dial: Dial) -> None:
        client = dial(shared)
        put(client, [b"k"])
        upload = shared.store.table.reserve(10)
        assert upload is not None
        shared.store.publish(b"short", upload)
        results = client.get_many_into([b"k", b"short"], [bytearray(ROW_BYTES - 1), bytearray(ROW_BYTES)])
        assert [result.reason for result in results] == [MissReason.TOO_LARGE, MissReason.HEADER]

    def test_rows_scattered_over_many_pieces(self, shared: StoreServer, dial: Dial) -> None:
        client, tcp = dial(shared), dial(shared.address)
        small = [b"small-%04d" % number for number in range(1630)]
        assert put(tcp, small, 10_000) == [None] * 1630
        assert client.delete_many(small[::2])
        assert put(client, [b"big"], 2 * MIB) == [None]
        slot = shared.store.lease(b"big")
        assert slot is not None
        assert len(shared.store.table.runs(slot)) > 100
        shared.store.table.release(slot)
        assert get(client, [b"big"], 2 * MIB) == [None]
        assert set(moved(client)) == {("shared", "put"), ("shared", "get")}
        assert put(client, [b"big"], 4 * MIB) == get(client, [b"big"], 4 * MIB) == [None]
        assert set(moved(client)) == {("shared", "put"), ("shared", "get"), ("unix", "put"), ("unix", "get")}

    def test_more_than_a_store_lends_travels_over_the_socket(
        self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial
    ) -> None:
        server = start_store(unix=tmp_path / "s", capacity_bytes=4 * MIB)
        client = dial(server)
        taken = server.store.lent
        assert taken.take(taken.limit_bytes)
        keys = [b"a", b"b", b"c"]
        assert put(client, keys) == get(client, keys) == [None] * 3
        assert set(moved(client)) == {("unix", "put"), ("unix", "get")}
        taken.give_back(taken.limit_bytes)
        assert put(client, keys) == get(client, keys) == [None] * 3
        assert moved(client)["shared", "get"] == 3 * ROW_BYTES
        until(lambda: taken.taken_bytes == 0)

    def test_what_a_store_does_not_keep_is_told_by_reason(self, shared: StoreServer, dial: Dial) -> None:
        client = dial(shared)
        puts = [Put(b"large", Header(), bytes(9 * MIB)), Put(b"k", Header(), row_of(b"k"))]
        assert [result.reason for result in client.put_many(puts)] == [MissReason.TOO_LARGE, None]
        assert get(client, [b"k"]) == [None]

    def test_a_full_store_refuses_and_goes_on(self, shared: StoreServer, dial: Dial) -> None:
        client = dial(shared)
        uploads = [shared.store.table.reserve(MIB) for _ in range(8)]
        assert put(client, [b"k"]) == [MissReason.REFUSED]
        shared.store.table.abandon(uploads[0])  # type: ignore[arg-type]
        assert put(client, [b"k"]) == get(client, [b"k"]) == [None]

    def test_bytes_changed_in_the_pool_are_a_miss_and_deleted(self, shared: StoreServer, dial: Dial) -> None:
        client = dial(shared)
        put(client, [b"good", b"bad"])
        slot = shared.store.lease(b"bad")
        assert slot is not None
        shared.store.table.views(slot)[0][5000] ^= 1
        shared.store.table.release(slot)
        assert get(client, [b"bad", b"good"]) == [MissReason.CHECKSUM, None]
        assert get(client, [b"bad"]) == [MissReason.ABSENT]

    def test_eight_threads_never_see_another_keys_bytes_while_the_store_evicts(
        self, shared: StoreServer, dial: Dial
    ) -> None:
        client = dial(shared)
        keys = [b"key-%03d" % number for number in range(120)]  # 24 MB in a store of 16 MiB
        reasons: set[MissReason | None] = set()

        def work(first: int) -> None:
            for number in range(12):
                start = (first * 7 + number * 11) % 100
                reasons.update(put(client, keys[start : start + 10]))
                reasons.update(get(client, keys[(start + 3) % 100 :][:12]))

        threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        assert reasons <= {None, MissReason.ABSENT, MissReason.REFUSED}
        assert shared.store.table.stats().evictions > 0
        until(lambda: shared.store.lent.taken_bytes == 0)


class TestStoresThatDoNotShare:
    def test_one_that_is_told_not_to(self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial) -> None:
        client = dial(start_store(unix=tmp_path / "s", shared_memory=False))
        assert put(client, [b"k"]) == get(client, [b"k"]) == [None]
        assert set(moved(client)) == {("unix", "put"), ("unix", "get")}

    def test_a_client_that_is_told_not_to(self, shared: StoreServer, dial: Dial) -> None:
        client = dial(shared, shared_memory=False)
        assert put(client, [b"k"]) == get(client, [b"k"]) == [None]
        assert set(moved(client)) == {("unix", "put"), ("unix", "get")}

    def test_a_redis(self, redis_server_binary: str, tmp_path: Path, dial: Dial) -> None:
        path = tmp_path / "redis.sock"
        command = [redis_server_binary, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                until(path.exists)
                client = dial(f"unix:{path}")
                assert put(client, [b"k"]) == get(client, [b"k"]) == [None]
                assert set(moved(client)) == {("unix", "put"), ("unix", "get")}
            finally:
                process.kill()

    def test_one_that_answers_nonsense_costs_a_miss(
        self, fake_store: Callable[..., Any], tmp_path: Path, dial: Dial
    ) -> None:
        def script(sock: Any) -> None:
            sock.recv(1000)
            sock.sendall(b":4096\r\n")  # attached, without a descriptor
            sock.recv(1000)
            sock.sendall(b"HTTP/1.1 400\r\n")

        client = dial(fake_store(script, tmp_path / "s").address, timeout_seconds=2)
        assert get(client, [b"k"]) == [MissReason.PROTOCOL]

    @pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK])
    def test_memory_that_cannot_be_mapped_safely_is_left_alone(
        self, fake_store: Callable[..., Any], tmp_path: Path, dial: Dial, seals: int
    ) -> None:
        def script(sock: Any) -> None:
            fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            sock.recv(1000)
            socket.send_fds(sock, [b":%d\r\n" % (8192 if seals else 4096)], [fd])
            os.close(fd)
            sock.recv(1000)
            sock.sendall(b"$-1\r\n")

        client = dial(fake_store(script, tmp_path / "s").address)
        assert get(client, [b"k"]) == [MissReason.ABSENT]
        client.close()
        assert not [fd for fd in os.listdir("/proc/self/fd") if "memfd:test" in _target(fd)]

    def test_no_thread_to_look_after_the_memory(
        self, shared: StoreServer, dial: Dial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == "kvhearth-store-mapping":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        client = dial(shared)
        assert put(client, [b"k"]) == get(client, [b"k"]) == [None]
        assert set(moved(client)) == {("unix", "put"), ("unix", "get")}

    def test_one_that_does_not_answer_costs_the_deadline(
        self, fake_store: Callable[..., Any], tmp_path: Path, dial: Dial
    ) -> None:
        client = dial(fake_store(lambda sock: time.sleep(1), tmp_path / "s").address, timeout_seconds=0.1)
        assert get(client, [b"k"]) == [MissReason.TIMEOUT]


class TestMappings:
    def test_all_connections_of_a_client_share_one_and_it_goes_with_the_client(
        self, shared: StoreServer, dial: Dial
    ) -> None:
        client, before = dial(shared, max_connections=8), maps()
        barrier = threading.Barrier(8)

        def work() -> None:
            barrier.wait(SECONDS)
            for _ in range(20):
                get(client, [b"k"])

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert maps() <= before + 1
        client.close()
        until(lambda: maps() <= before)

    def test_a_restarted_store_is_attached_to_anew_and_the_old_memory_let_go(
        self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial
    ) -> None:
        server = start_store(unix=tmp_path / "s")
        client, without = dial(server), maps()
        assert put(client, [b"k"]) == [None]
        server.stop()
        again = start_store(unix=tmp_path / "s")
        assert get(client, [b"k"]) == [MissReason.ABSENT]
        assert put(client, [b"k"]) == get(client, [b"k"]) == [None]
        assert len(again.store.table) == 1
        assert moved(client)["shared", "get"] == ROW_BYTES
        until(lambda: maps() <= without + 1)

    def test_the_memory_of_a_store_that_is_gone_is_let_go_by_clients_that_ask_no_more(
        self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial
    ) -> None:
        before = maps()
        server = start_store(unix=tmp_path / "s")
        client = dial(server)
        assert put(client, [b"k"]) == [None]
        assert maps() >= 2  # its own two; one that an earlier test held may have gone meanwhile
        server.stop()
        until(lambda: maps() <= before)

    def test_two_hundred_reconnects_leave_nothing_behind(
        self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial
    ) -> None:
        server = start_store(unix=tmp_path / "s")
        address = next(str(found) for found in server.addresses if found.is_unix)
        put(dial(server), [b"k"], MIB)

        def visit() -> None:
            with contextlib.closing(StoreClient(address, timeout_seconds=SECONDS)) as client:
                assert get(client, [b"k"], MIB) == [None]

        visit()
        files, mapped, threads = open_files(), maps(), threading.active_count()
        for _ in range(200):
            visit()
        until(lambda: open_files() <= files and maps() <= mapped and threading.active_count() <= threads)
        assert server.store.lent.taken_bytes == 0

    def test_connections_that_are_cut_again_and_again_share_one_mapping(self, shared: StoreServer, dial: Dial) -> None:
        client = dial(shared)
        put(client, [b"k"])
        mapped = maps()
        for _ in range(50):
            for connection in list(shared._connections):
                connection.cut("test")
            assert get(client, [b"k"]) == [None]
        until(lambda: maps() <= mapped)


SERVER = """
import sys
from pathlib import Path
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer
import threading
server = StoreServer(StoreConfig(capacity_bytes=32 * 2**20, listen=None, unix=Path(sys.argv[1]))).start()
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def child_store(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", SERVER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


class TestKilledStores:
    """Case: server killed and restarted inside one heartbeat: every call is a hit or a miss, and the engine lives."""

    def test_a_store_killed_while_clients_copy_is_a_hit_or_a_miss_and_comes_back(
        self, tmp_path: Path, dial: Dial
    ) -> None:
        path, keys = tmp_path / "s", [b"key-%d" % number for number in range(6)]
        client = dial(f"unix:{path}", timeout_seconds=2)
        reasons: set[MissReason | None] = set()

        def work() -> None:
            found: set[MissReason | None] = set()
            while found <= {None, MissReason.REFUSED}:
                found.update(get(client, keys, MIB), put(client, keys[:2], MIB))
            reasons.update(found)

        with child_store(path) as process:
            assert put(client, keys, MIB) == [None] * 6
            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            until(lambda: moved(client).get(("shared", "get"), 0) > 20 * MIB)
            process.kill()
            for thread in threads:
                thread.join(SECONDS)
                assert not thread.is_alive()
        with child_store(path):
            until(lambda: client.ping() is None)
            assert put(client, keys, MIB) == get(client, keys, MIB) == [None] * 6
        assert reasons <= {
            None,
            MissReason.REFUSED,
            MissReason.UNREACHABLE,
            MissReason.BREAKER_OPEN,
        }
        assert not list(Path("/dev/shm").glob("*kvhearth-store*"))
