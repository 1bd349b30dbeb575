"""The client: rows in and out of the caller's buffers, and every failure a miss with its reason, in time."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.metrics import Registry, parse_exposition
from kvhearth.store.client.client import MAX_RECORD_BYTES, Put, StoreClient
from kvhearth.store.client.outcomes import GetResult, MissReason
from kvhearth.store.client.wire import encode_command
from kvhearth.store.protocol.header import HEADER_BYTES, Header
from kvhearth.store.protocol.packed import MAGIC
from kvhearth.store.server.server import StoreServer

MIB = 2**20
SECONDS = 10.0


@pytest.fixture
def dial() -> Iterator[Callable[..., StoreClient]]:
    """Makes clients, and closes them."""
    made: list[StoreClient] = []

    def dial(address: str, timeout_seconds: float = SECONDS, **settings: object) -> StoreClient:
        made.append(StoreClient(address, timeout_seconds=timeout_seconds, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield dial
    for client in made:
        client.close()


any_key = st.binary(min_size=1, max_size=20).filter(lambda key: not key.startswith(MAGIC))


class TestRows:
    @pytest.mark.parametrize("where", ["tcp", "unix"])
    def test_a_row_comes_back_into_the_buffer_with_its_header(
        self, start_store: Callable[..., StoreServer], dial: Callable[..., StoreClient], tmp_path: Path, where: str
    ) -> None:
        store = start_store(
            capacity_bytes=16 * MIB, **({"listen": None, "unix": tmp_path / "s"} if where == "unix" else {})
        )
        client = dial(store.address)
        row = os.urandom(3 * MIB)
        assert client.put(b"k", Header(position=7, parent=9, recompute_ns=11, group=1, epoch=3), row).stored
        buffer = bytearray(4 * MIB)
        result = client.get_into(b"k", buffer)
        assert result.hit
        assert buffer[: result.nbytes] == row
        assert result.header is not None
        assert result.header[:6] == (7, 9, 11, 1, 3, 3 * MIB)

    def test_numpy_arrays_are_buffers(self, client: StoreClient) -> None:
        row = np.arange(1000, dtype=np.int32).reshape(10, 100)
        assert client.put(b"k", Header(), row).stored
        buffer = np.zeros_like(row)
        assert client.get_into(b"k", buffer).hit
        assert (buffer == row).all()

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(rows=st.dictionaries(any_key, st.binary(max_size=9000), max_size=8))
    def test_many_rows_go_and_come_in_one_pipeline(self, client: StoreClient, rows: dict[bytes, bytes]) -> None:
        puts = [Put(key, Header(position=index), row) for index, (key, row) in enumerate(rows.items())]
        assert all(result.stored for result in client.put_many(puts))
        keys = [*rows, b"this key was never put"]
        buffers = [bytearray(9000) for _ in keys]
        results = client.get_many_into(keys, buffers)
        assert [result.reason for result in results] == [None] * len(rows) + [MissReason.ABSENT]
        for result, buffer, row in zip(results, buffers, rows.values(), strict=False):
            assert buffer[: result.nbytes] == row

    def test_more_rows_than_one_window(self, client: StoreClient) -> None:
        keys = [b"%d" % number for number in range(200)]
        client.put_many([Put(key, Header(), key * 10) for key in keys])
        buffers = [bytearray(100) for _ in keys]
        results = client.get_many_into(keys, buffers)
        assert [bytes(b[: r.nbytes]) for r, b in zip(results, buffers, strict=True)] == [key * 10 for key in keys]

    def test_match_counts_leading_keys_however_many(self, client: StoreClient) -> None:
        keys = [b"%04d" % number for number in range(1500)]
        client.put_many([Put(key, Header(), b"") for key in keys[:1300]])
        assert client.match(keys) == 1300
        assert client.match([b"absent", *keys]) == 0
        assert client.match([]) == 0

    def test_exists_many_says_of_each_key_however_many(self, client: StoreClient) -> None:
        keys = [b"%04d" % number for number in range(1500)]
        client.put_many([Put(key, Header(), b"") for key in keys[::3]])
        assert client.exists_many(keys) == [number % 3 == 0 for number in range(1500)]
        assert client.exists_many([]) == []

    def test_pins_hold_values_until_they_are_unpinned(self, client: StoreClient, store: StoreServer) -> None:
        client.put_many([Put(key, Header(), bytes(MIB)) for key in (b"a", b"b")])
        assert client.pin([b"a", b"b", b"absent"]) == 2
        client.put_many([Put(b"%d" % number, Header(), bytes(MIB)) for number in range(20)])
        assert client.exists_many([b"a", b"b"]) == [True, True]
        assert client.stats()["pinned_bytes"] == str(store.store.table.stats().pinned_bytes)
        assert client.unpin([b"a", b"absent"]) == 1
        client.put_many([Put(b"%d" % number, Header(), bytes(MIB)) for number in range(20)])
        assert client.exists_many([b"a", b"b"]) == [False, True]

    def test_pins_beyond_the_stores_bound_are_none_and_no_outage(self, client: StoreClient) -> None:
        keys = [b"%d" % number for number in range(7)]
        client.put_many([Put(key, Header(), bytes(MIB)) for key in keys])
        for _ in range(10):
            assert client.pin(keys) == 0
        assert client.counts["pin", "refused"] == 10
        assert client.pin(keys[:3]) == 3

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(record=st.binary(max_size=MAX_RECORD_BYTES))
    def test_a_small_record_comes_back_as_it_went(self, client: StoreClient, record: bytes) -> None:
        assert client.put_record(b"record", record).stored
        assert client.get_record(b"record") == (None, record)

    def test_an_absent_record_is_told_from_a_silent_store(self, client: StoreClient, store: StoreServer) -> None:
        assert client.get_record(b"nothing") == (MissReason.ABSENT, None)
        store.stop()
        assert client.get_record(b"nothing") == (MissReason.UNREACHABLE, None)

    def test_a_record_too_large_is_a_mistake_of_the_caller(self, client: StoreClient) -> None:
        with pytest.raises(ValueError, match="a record of 65537 bytes is longer than 65536"):
            client.put_record(b"k", bytes(MAX_RECORD_BYTES + 1))

    def test_exists_delete_ping_and_stats(self, client: StoreClient) -> None:
        client.put(b"k", Header(), b"row")
        assert client.exists(b"k")
        assert client.delete(b"k")
        assert not client.delete(b"k")
        assert not client.exists(b"k")
        assert client.ping() is None
        assert client.stats()["maxmemory"] == str(8 * MIB)

    def test_it_works_on_a_real_redis_too(
        self, redis_server_binary: str, dial: Callable[..., StoreClient], tmp_path: Path
    ) -> None:
        path = tmp_path / "redis.sock"
        command = [redis_server_binary, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            client = dial(f"unix:{path}")
            wait_until(lambda: client.ping() is None)
            assert client.put(b"a", Header(), bytes(MIB)).stored
            assert client.get_into(b"a", bytearray(MIB)).hit
            assert client.match([b"a", b"b", b"a"]) == 1
            assert client.match([b"a", b"a"]) == 2
            for asker in (client, dial(f"unix:{path}")):
                assert asker.exists_many([b"a", b"b", b"a"]) == [True, False, True]
            for pinner in (client, dial(f"unix:{path}")):
                assert [pinner.pin([b"a"]) for _ in range(10)] == [pinner.unpin([b"a"]) for _ in range(10)] == [0] * 10
                assert pinner.ping() is None
            assert client.put_record(b"record", b"{}").stored
            assert client.get_record(b"record").record == b"{}"
            assert int(client.stats()["used_memory"]) > MIB
        finally:
            process.terminate()
            process.wait(SECONDS)


class TestMisses:
    def test_absent(self, client: StoreClient) -> None:
        assert client.get_into(b"nothing", bytearray(10)) == GetResult(MissReason.ABSENT)

    @pytest.mark.parametrize("where", ["header", "checksum", "row", "length"])
    def test_corrupt_bytes_are_a_miss_are_deleted_and_counted(
        self, client: StoreClient, redis_py: redis.Redis, where: str
    ) -> None:
        for key in (b"before", b"bad", b"after"):
            client.put(key, Header(), b"row of " + key)
        value = bytearray(redis_py.get("bad"))
        if where == "length":
            value = value[:-1]
        else:
            value[{"header": 0, "checksum": HEADER_BYTES - 1, "row": HEADER_BYTES}[where]] ^= 1
        redis_py.set("bad", bytes(value))
        results = client.get_many_into([b"before", b"bad", b"after"], [bytearray(100) for _ in range(3)])
        assert [result.reason for result in results] == [None, MissReason.CHECKSUM, None]
        assert not client.exists(b"bad")
        assert client.counts[("get", "checksum")] == 1

    def test_another_keys_bytes_are_a_miss(self, client: StoreClient, redis_py: redis.Redis) -> None:
        client.put(b"theirs", Header(), b"their row")
        redis_py.set("mine", redis_py.get("theirs"))
        assert client.get_into(b"mine", bytearray(100)).reason is MissReason.CHECKSUM

    def test_a_value_of_a_later_version_is_a_miss_and_stays(self, client: StoreClient, redis_py: redis.Redis) -> None:
        redis_py.set("k", b"KVHV\x02" + bytes(100))
        assert client.get_into(b"k", bytearray(200)).reason is MissReason.HEADER
        assert client.exists(b"k")

    def test_a_value_that_is_no_row_is_a_miss(self, client: StoreClient, redis_py: redis.Redis) -> None:
        redis_py.set("k", b"short")
        assert client.get_into(b"k", bytearray(200)).reason is MissReason.HEADER

    def test_a_row_larger_than_the_buffer_is_a_miss_and_the_rest_arrives(self, client: StoreClient) -> None:
        client.put_many([Put(b"large", Header(), bytes(MIB)), Put(b"small", Header(), b"row")])
        results = client.get_many_into([b"large", b"small"], [bytearray(10), bytearray(10)])
        assert [result.reason for result in results] == [MissReason.TOO_LARGE, None]

    def test_a_row_larger_than_the_store_keeps_is_not_stored_and_the_rest_is(self, client: StoreClient) -> None:
        puts = [Put(b"large", Header(), bytes(5 * MIB)), Put(b"small", Header(), b"row")]
        assert [result.reason for result in client.put_many(puts)] == [MissReason.TOO_LARGE, None]

    def test_a_wrong_password_is_a_refusal(
        self, start_store: Callable[..., StoreServer], dial: Callable[..., StoreClient]
    ) -> None:
        store = start_store(password="right")
        assert dial(store.address, password="wrong").ping() is MissReason.REFUSED
        assert dial(store.address).get_into(b"k", bytearray(1)).reason is MissReason.REFUSED
        assert dial(store.address, password="right").ping() is None

    def test_nobody_there(self, dial: Callable[..., StoreClient], tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"unix:{tmp_path}/nothing"):
            client = dial(address)
            assert client.get_into(b"k", bytearray(1)).reason is MissReason.UNREACHABLE
            assert not client.put(b"k", Header(), b"").stored
            assert (client.match([b"k"]), client.exists(b"k"), client.stats()) == (0, False, {})
            assert (client.exists_many([b"k", b"l"]), client.pin([b"k"]), client.unpin([b"k"])) == ([False] * 2, 0, 0)

    @pytest.mark.parametrize(
        "answer", [b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b":1\r\n", b"$70\r\n" + bytes(75) + b"\r\n", bytes(5000)]
    )
    def test_what_does_not_speak_the_protocol(
        self, dial: Callable[..., StoreClient], fake_store: Callable[..., Any], answer: bytes
    ) -> None:
        def script(sock: socket.socket) -> None:
            sock.recv(1000)
            sock.sendall(answer)

        server = fake_store(script)
        assert dial(server.address).get_into(b"k", bytearray(100)).reason is MissReason.PROTOCOL

    def test_more_matches_than_keys_are_no_answer(
        self, dial: Callable[..., StoreClient], fake_store: Callable[..., Any]
    ) -> None:
        client = dial(
            fake_store(
                lambda sock: [sock.sendall(b"$3\r\nddk\r\n") for _ in iter(lambda: sock.recv(4096), b"")]
            ).address
        )
        assert client.match_tiers([b"a", b"b", b"c"]) == b"ddk"
        assert client.match([b"a", b"b"]) == 0
        assert client.counts["match", "protocol"] == 1

    @pytest.mark.parametrize("answer", [b"*1\r\n:1\r\n", b"$1\r\nd\r\n", b"$3\r\nddd\r\n", b"$2\r\nddd\r\n"])
    def test_too_few_or_other_answers_than_asked_for_are_none(
        self, dial: Callable[..., StoreClient], fake_store: Callable[..., Any], answer: bytes
    ) -> None:
        def script(sock: socket.socket) -> None:
            sock.recv(4096)
            sock.sendall(answer)

        client = dial(fake_store(script).address)
        assert client.exists_many([b"a", b"b"]) == [False, False]
        assert client.counts["exists", "protocol"] == 1

    def test_a_store_that_knows_no_kv_commands_is_told_so_once(
        self, dial: Callable[..., StoreClient], fake_store: Callable[..., Any]
    ) -> None:
        asked: list[bytes] = []

        def script(sock: socket.socket) -> None:
            while data := sock.recv(4096):
                asked.append(data.split(b"\r\n")[2])
                sock.sendall(b"-ERR unknown command\r\n" if asked[-1].startswith(b"KV.") else b":1\r\n")

        client = dial(fake_store(script).address)
        for _ in range(3):
            assert client.exists_many([b"a"]) == [True]
            assert client.match([b"a"]) == 1
            assert client.pin([b"a"]) == 0
        assert asked == [b"KV.EXISTS", *[b"EXISTS"] * 6]

    def test_a_reply_too_many_is_never_taken_for_the_next_calls(
        self, dial: Callable[..., StoreClient], fake_store: Callable[..., Any]
    ) -> None:
        def script(sock: socket.socket) -> None:
            while sock.recv(4096):
                sock.sendall(b":1\r\n:0\r\n")

        server = fake_store(script)
        client = dial(server.address)
        assert [client.exists(b"k") for _ in range(3)] == [True, True, True]
        assert server.connections == 3

    def test_all_connections_taken_until_the_deadline(
        self, dial: Callable[..., StoreClient], fake_store: Callable[..., Any]
    ) -> None:
        server = fake_store(lambda sock: time.sleep(SECONDS))
        client = dial(server.address, max_connections=1)
        other = threading.Thread(target=client.ping, kwargs={"timeout_seconds": 2.0})
        other.start()
        wait_until(lambda: server.connections == 1)
        assert client.ping(timeout_seconds=0.1) is MissReason.BUSY
        other.join(SECONDS)


class TestDeadlines:
    def silent(self, sock: socket.socket) -> None:
        sock.recv(1)
        threading.Event().wait(SECONDS)

    def dripping(self, sock: socket.socket) -> None:
        sock.recv(1000)
        for byte in b"$1064\r\n" + bytes(1064):
            sock.sendall(bytes([byte]))
            time.sleep(0.02)

    def half(self, sock: socket.socket) -> None:
        sock.recv(1000)
        sock.sendall(b"$1064\r\n" + bytes(500))
        threading.Event().wait(SECONDS)

    def sipping(self, sock: socket.socket) -> None:
        while sock.recv(10_000):
            time.sleep(0.02)

    @pytest.mark.parametrize("where", ["tcp", "unix"])
    @pytest.mark.parametrize("behaviour", ["silent", "dripping", "half", "sipping"])
    @pytest.mark.parametrize("call", ["get", "put"])
    def test_a_stalling_store_costs_a_call_its_deadline_and_no_more(
        self,
        dial: Callable[..., StoreClient],
        fake_store: Callable[..., Any],
        tmp_path: Path,
        where: str,
        behaviour: str,
        call: str,
    ) -> None:
        server = fake_store(getattr(self, behaviour), tmp_path / "s" if where == "unix" else None)
        client = dial(server.address, timeout_seconds=0.15, shared_memory=False)
        if call == "get":
            reason = client.get_into(b"k", bytearray(1000)).reason
        else:
            reason = client.put(b"k", Header(), bytes(32 * MIB)).reason
        assert reason is MissReason.TIMEOUT or (call, behaviour) == ("put", "dripping")
        # The connection may still have a reply under way: it must not serve another call.
        client.ping(timeout_seconds=0.05)
        wait_until(lambda: server.connections == 2)

    def test_a_late_reply_is_never_taken_for_the_next_calls(
        self, dial: Callable[..., StoreClient], fake_store: Callable[..., Any]
    ) -> None:
        def script(sock: socket.socket) -> None:
            while data := sock.recv(1000):
                if data == encode_command(b"EXISTS", b"slow"):
                    time.sleep(0.3)
                    sock.sendall(b":1\r\n")
                else:
                    sock.sendall(b":0\r\n")

        server = fake_store(script)
        client = dial(server.address)
        assert not client.exists(b"slow", timeout_seconds=0.05)
        assert client.counts[("exists", "timeout")] == 1
        assert [client.exists(b"fast") for _ in range(3)] == [False] * 3
        assert client.counts[("exists", "ok")] == 3

    @pytest.mark.parametrize("where", ["tcp", "unix"])
    def test_after_a_timeout_nothing_more_is_written_into_the_buffers(
        self, dial: Callable[..., StoreClient], fake_store: Callable[..., Any], tmp_path: Path, where: str
    ) -> None:
        resume, sent = threading.Event(), threading.Event()

        def script(sock: socket.socket) -> None:
            sock.recv(1000)
            sock.sendall(b"$1064\r\n" + b"\xaa" * 564)
            resume.wait(SECONDS)
            try:
                for _ in range(100):
                    sock.sendall(b"\xbb" * 500 + b"\r\n$1064\r\n" + b"\xcc" * 1064)
            finally:
                sent.set()

        server = fake_store(script, tmp_path / "s" if where == "unix" else None)
        client = dial(server.address)
        buffers = [bytearray(1000), bytearray(1000)]
        results = client.get_many_into([b"a", b"b"], buffers, timeout_seconds=0.1)
        assert [result.reason for result in results] == [MissReason.TIMEOUT] * 2
        assert bytes(buffers[0]) == b"\xaa" * 500 + bytes(500)
        ours = [b"\x11" * 1000, b"\x22" * 1000]  # the buffers are the caller's again
        for buffer, content in zip(buffers, ours, strict=True):
            buffer[:] = content
        resume.set()
        assert sent.wait(SECONDS)
        assert client.ping(timeout_seconds=0.05) is not None
        assert [bytes(buffer) for buffer in buffers] == ours


class TestThreads:
    def test_several_threads_fetch_at_once_each_over_a_connection_of_its_own(
        self, dial: Callable[..., StoreClient], start_store: Callable[..., StoreServer]
    ) -> None:
        store = start_store(capacity_bytes=32 * MIB)
        client = dial(store.address, max_connections=4)
        rows = {b"%d" % number: os.urandom(MIB) for number in range(16)}
        client.put_many([Put(key, Header(), row) for key, row in rows.items()])
        start = threading.Barrier(4)
        wrong: list[object] = []

        def work(number: int) -> None:
            keys = [b"%d" % (number * 4 + place) for place in range(4)]
            buffers = [bytearray(MIB) for _ in keys]
            start.wait(SECONDS)
            for _ in range(5):
                results = client.get_many_into(keys, buffers)
                wrong.extend(result for result in results if not result.hit)
                wrong.extend(key for key, buffer in zip(keys, buffers, strict=True) if buffer != rows[key])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not wrong
        assert client.counts["get", "ok"] == 80
        assert int(client.stats()["total_connections_received"]) <= 4


class TestOutages:
    def test_a_dead_store_misses_at_once_and_heals_by_itself(
        self, start_store: Callable[..., StoreServer], dial: Callable[..., StoreClient]
    ) -> None:
        store = start_store()
        client = dial(store.address)
        assert client.put(b"k", Header(), b"row").stored
        store.stop()
        reasons = [client.get_into(b"k", bytearray(10)).reason for _ in range(50)]
        assert set(reasons) <= {MissReason.UNREACHABLE, MissReason.BREAKER_OPEN}
        assert MissReason.BREAKER_OPEN in reasons
        start_store(listen=store.address)
        wait_until(lambda: client.ping() is None)
        assert client.put(b"k", Header(), b"row").stored
        assert client.get_into(b"k", bytearray(10)).hit

    def test_a_store_that_restarted_between_two_calls_is_not_even_noticed(
        self, start_store: Callable[..., StoreServer], dial: Callable[..., StoreClient]
    ) -> None:
        store = start_store()
        client = dial(store.address)
        for _ in range(3):
            assert client.put(b"k", Header(), b"row").stored
        store.stop()
        start_store(listen=store.address)
        assert client.put(b"k", Header(), b"row").stored
        assert client.get_into(b"k", bytearray(10)).hit

    def test_a_store_killed_under_load_gives_misses_only(
        self, start_store: Callable[..., StoreServer], dial: Callable[..., StoreClient]
    ) -> None:
        store = start_store(capacity_bytes=16 * MIB)
        client = dial(store.address)
        row = os.urandom(MIB)
        stop = threading.Event()
        wrong: list[object] = []

        def work(key: bytes) -> None:
            buffer = bytearray(MIB)
            while not stop.is_set():
                client.put(key, Header(), row)
                if client.get_into(key, buffer).hit and buffer != row:
                    wrong.append(key)

        threads = [threading.Thread(target=work, args=(b"k%d" % number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: client.counts.get(("get", "ok"), 0) > 10)
        store.stop()
        wait_until(lambda: client.counts.get(("get", "breaker_open"), 0) > 10)
        start_store(listen=store.address, capacity_bytes=16 * MIB)
        hits = client.counts[("get", "ok")]
        wait_until(lambda: client.counts[("get", "ok")] > hits + 10)
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
        assert not wrong


class TestUse:
    @pytest.mark.parametrize("key", [b"", b"x" * 513, "text"])
    def test_a_bad_key_is_a_mistake_of_the_caller(self, client: StoreClient, key: bytes) -> None:
        for call in (
            client.exists,
            client.delete,
            lambda key: client.match([key]),
            lambda key: client.put(key, Header(), b""),
        ):
            with pytest.raises(ValueError, match="want 1 to 512 bytes"):
                call(key)

    def test_a_read_only_buffer_is_a_mistake_of_the_caller(self, client: StoreClient) -> None:
        with pytest.raises(ValueError, match="writable"):
            client.get_into(b"k", b"read only")

    def test_a_buffer_too_few_is_a_mistake_of_the_caller(self, client: StoreClient) -> None:
        with pytest.raises(ValueError, match="2 keys and 1 buffers"):
            client.get_many_into([b"a", b"b"], [bytearray(1)])

    def test_a_bad_address_is_the_users_to_put_right(self) -> None:
        with pytest.raises(UserError, match="'nowhere' is not an address"):
            StoreClient("nowhere")

    def test_a_closed_client_misses(self, client: StoreClient) -> None:
        assert client.ping() is None
        client.close()
        assert client.ping() is MissReason.UNREACHABLE

    def test_misses_are_metrics_by_reason(self, client: StoreClient) -> None:
        client.put(b"k", Header(), b"row")
        client.get_many_into([b"k", b"x", b"y"], [bytearray(3) for _ in range(3)])
        registry = Registry()
        registry.collect_from(client.metrics)
        calls = parse_exposition(registry.expose().decode())["kvhearth_store_client_calls_total"]
        assert calls[(("operation", "get"), ("outcome", "absent"))] == 2
        assert calls[(("operation", "get"), ("outcome", "ok"))] == 1


def wait_until(check: Callable[[], bool]) -> None:
    give_up = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.01)
