"""The asyncio client: rows in and out of the caller's memory, every failure a miss in time, and cancellation."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.metrics import Registry, parse_exposition
from kvhearth.store.client.async_client import AsyncStoreClient
from kvhearth.store.client.client import Put, StoreClient
from kvhearth.store.client.outcomes import MissReason
from kvhearth.store.client.wire import encode_command
from kvhearth.store.protocol.header import Header
from kvhearth.store.protocol.packed import MAGIC
from kvhearth.store.protocol.tls import TlsSettings
from kvhearth.store.server.server import StoreServer

MIB = 2**20
SECONDS = 10.0

KEYS = st.binary(min_size=1, max_size=20).filter(lambda key: not key.startswith(MAGIC))

Dial = Callable[..., AsyncStoreClient]
FakeStore = Callable[..., Any]


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    """Makes clients, and closes them."""
    made: list[AsyncStoreClient] = []

    def dial(address: str, timeout_seconds: float = SECONDS, **settings: Any) -> AsyncStoreClient:
        made.append(AsyncStoreClient(address, timeout_seconds=timeout_seconds, **settings))
        return made[-1]

    yield dial
    for client in made:
        client.close()


@pytest.fixture
async def aclient(store: StoreServer, dial: Dial) -> AsyncStoreClient:
    """A client of `store`."""
    return dial(store.address)


async def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up, "it never happened"
        await asyncio.sleep(0.01)


class TestRows:
    @pytest.mark.parametrize("where", ["tcp", "unix"])
    async def test_a_row_comes_back_into_the_buffer_with_its_header(
        self, start_store: Callable[..., StoreServer], dial: Dial, tmp_path: Path, where: str
    ) -> None:
        more = {"listen": None, "unix": tmp_path / "s"} if where == "unix" else {}
        client = dial(start_store(capacity_bytes=16 * MIB, **more).address)
        row = os.urandom(3 * MIB)
        assert (await client.put(b"k", Header(position=7, parent=9, group=1, epoch=3), row)).stored
        buffer = bytearray(4 * MIB)
        result = await client.get_into(b"k", memoryview(buffer))
        assert result.hit
        assert buffer[: result.nbytes] == row
        assert buffer[result.nbytes :] == bytes(MIB)
        assert result.header is not None
        assert result.header[:6] == (7, 9, 0, 1, 3, 3 * MIB)

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(rows=st.dictionaries(KEYS, st.binary(max_size=9000), max_size=8))
    def test_many_rows_go_and_come_in_one_pipeline(self, store: StoreServer, rows: dict[bytes, bytes]) -> None:
        async def there_and_back() -> None:
            client = AsyncStoreClient(store.address, timeout_seconds=SECONDS)
            puts = [Put(key, Header(position=index), row) for index, (key, row) in enumerate(rows.items())]
            assert all(result.stored for result in await client.put_many(puts))
            keys = [*rows, b"this key was never put"]
            buffers = [bytearray(9000) for _ in keys]
            results = await client.get_many_into(keys, buffers)
            assert [result.reason for result in results] == [None] * len(rows) + [MissReason.ABSENT]
            for result, buffer, row in zip(results, buffers, rows.values(), strict=False):
                assert buffer[: result.nbytes] == row
            client.close()

        asyncio.run(there_and_back())

    def test_the_same_under_uvloop(self, store: StoreServer) -> None:
        async def there_and_back() -> None:
            client = AsyncStoreClient(store.address, timeout_seconds=SECONDS)
            row, buffer = os.urandom(2 * MIB), bytearray(2 * MIB)
            assert (await client.put(b"k", Header(), row)).stored
            assert (await client.get_into(b"k", buffer)).hit
            assert buffer == row
            assert await client.match([b"k", b"l"]) == 1
            client.close()
            await asyncio.sleep(0)

        uvloop.run(there_and_back())

    async def test_more_rows_than_one_window(self, aclient: AsyncStoreClient) -> None:
        keys = [b"%d" % number for number in range(200)]
        await aclient.put_many([Put(key, Header(), key * 10) for key in keys])
        buffers = [bytearray(100) for _ in keys]
        results = await aclient.get_many_into(keys, buffers)
        assert [bytes(b[: r.nbytes]) for r, b in zip(results, buffers, strict=True)] == [key * 10 for key in keys]

    async def test_calls_overlap_and_each_gets_its_own(self, aclient: AsyncStoreClient) -> None:
        keys = [b"%03d" % number for number in range(40)]
        await asyncio.gather(*(aclient.put(key, Header(), key * 5000) for key in keys))
        buffers = [bytearray(15_000) for _ in keys]
        results = await asyncio.gather(*(aclient.get_into(k, b) for k, b in zip(keys, buffers, strict=True)))
        assert all(result.hit for result in results)
        assert buffers == [key * 5000 for key in keys]

    async def test_what_a_threaded_client_puts_an_asyncio_client_gets(
        self, client: StoreClient, aclient: AsyncStoreClient
    ) -> None:
        await asyncio.to_thread(client.put, b"k", Header(), b"row")
        buffer = bytearray(3)
        assert (await aclient.get_into(b"k", buffer)).hit
        assert buffer == b"row"

    async def test_wrong_use_is_told(self, aclient: AsyncStoreClient) -> None:
        with pytest.raises(ValueError, match="1 to 512 bytes"):
            await aclient.get_into(b"", bytearray(1))
        with pytest.raises(ValueError, match="writable"):
            await aclient.get_into(b"k", bytes(1))
        with pytest.raises(ValueError, match="2 keys and 1 buffers"):
            await aclient.get_many_into([b"a", b"b"], [bytearray(1)])
        with pytest.raises(UserError, match="not an address"):
            AsyncStoreClient("nonsense")


class TestQuestions:
    async def test_leading_keys_and_tiers_however_many(self, aclient: AsyncStoreClient) -> None:
        keys = [b"%04d" % number for number in range(1500)]
        await aclient.put_many([Put(key, Header(), b"") for key in keys[:1300]])
        assert await aclient.match(keys) == 1300
        assert await aclient.match_tiers(keys[1298:]) == b"dd"
        assert await aclient.match([b"absent", *keys]) == await aclient.match([]) == 0
        assert await aclient.exists_many(keys) == [True] * 1300 + [False] * 200
        assert await aclient.exists_many([]) == []
        assert await aclient.where(keys[1299:1301]) == b"d-"
        assert await aclient.prefetch(keys) == 1300

    async def test_orders(self, aclient: AsyncStoreClient) -> None:
        await aclient.put_many([Put(key, Header(), b"") for key in (b"a", b"b")])
        assert await aclient.delete_many([b"a", b"absent"])
        assert await aclient.exists_many([b"a", b"b"]) == [False, True]
        assert await aclient.ping() is None
        assert (await aclient.stats())["db0"].startswith("keys=1,")
        assert aclient.counts["put", "ok"] == 2
        registry = Registry()
        registry.collect_from(aclient.metrics)
        page = parse_exposition(registry.expose().decode())
        assert page["kvhearth_store_client_calls_total"][("operation", "put"), ("outcome", "ok")] == 2

    async def test_a_store_that_knows_no_kv_commands_is_told_so_once(self, dial: Dial, fake_store: FakeStore) -> None:
        asked: list[bytes] = []

        def script(sock: socket.socket) -> None:
            while data := sock.recv(4096):
                asked.append(data.split(b"\r\n")[2])
                sock.sendall(b"-ERR unknown command\r\n" if asked[-1].startswith(b"KV.") else b":1\r\n")

        client = dial(fake_store(script).address)
        for _ in range(3):
            assert await client.exists_many([b"a"]) == [True]
            assert await client.match_tiers([b"a"]) == b"d"
            assert await client.prefetch([b"a"]) == 0
        assert asked == [b"KV.EXISTS", *[b"EXISTS"] * 6]


class TestMisses:
    async def test_a_row_larger_than_the_buffer_is_a_miss_and_the_rest_arrives(self, aclient: AsyncStoreClient) -> None:
        await aclient.put_many([Put(b"large", Header(), bytes(MIB)), Put(b"small", Header(), b"row")])
        results = await aclient.get_many_into([b"large", b"small"], [bytearray(10), bytearray(10)])
        assert [result.reason for result in results] == [MissReason.TOO_LARGE, None]

    async def test_a_row_larger_than_the_store_keeps_is_not_stored_and_the_rest_is(
        self, aclient: AsyncStoreClient
    ) -> None:
        puts = [Put(b"large", Header(), bytes(5 * MIB)), Put(b"small", Header(), b"row")]
        assert [result.reason for result in await aclient.put_many(puts)] == [MissReason.TOO_LARGE, None]

    async def test_case_2_another_keys_bytes_are_a_miss_and_are_deleted(self, store: StoreServer, dial: Dial) -> None:
        client = dial(store.address)
        await client.put(b"other", Header(), b"row")
        with socket.create_connection(("127.0.0.1", store.addresses[0].port), 5) as sock:
            sock.sendall(encode_command(b"GET", b"other"))
            value = sock.recv(4096).partition(b"\r\n")[2][:-2]
            sock.sendall(encode_command(b"SET", b"k", value))
            assert sock.recv(100) == b"+OK\r\n"
        assert (await client.get_into(b"k", bytearray(10))).reason is MissReason.CHECKSUM
        assert (await client.get_into(b"k", bytearray(10))).reason is MissReason.ABSENT
        assert (await client.get_into(b"other", bytearray(10))).hit

    async def test_a_wrong_password_is_a_refusal(self, start_store: Callable[..., StoreServer], dial: Dial) -> None:
        address = start_store(password="right").address
        assert await dial(address, password="wrong").ping() is MissReason.REFUSED
        assert (await dial(address).get_into(b"k", bytearray(1))).reason is MissReason.REFUSED
        assert await dial(address, password="right").ping() is None

    async def test_case_2_a_store_dead_at_start(self, dial: Dial, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"unix:{tmp_path}/nothing"):
            client = dial(address)
            assert (await client.get_into(b"k", bytearray(1))).reason is MissReason.UNREACHABLE
            assert not (await client.put(b"k", Header(), b"")).stored
            assert not client.is_down
            assert (await client.match([b"k"]), await client.where([b"k"]), await client.stats()) == (0, b"-", {})
            assert client.is_down
            assert (await client.get_into(b"k", bytearray(1))).reason is MissReason.BREAKER_OPEN

    @pytest.mark.parametrize(
        "answer", [b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b":1\r\n", b"$70\r\n" + bytes(75) + b"\r\n", bytes(9000)]
    )
    async def test_what_does_not_speak_the_protocol(self, dial: Dial, fake_store: FakeStore, answer: bytes) -> None:
        def script(sock: socket.socket) -> None:
            sock.recv(1000)
            sock.sendall(answer)
            sock.recv(1000)

        client = dial(fake_store(script).address)
        assert (await client.get_into(b"k", bytearray(100))).reason is MissReason.PROTOCOL

    @pytest.mark.parametrize("answer", [b"$9\r\nddddddddd\r\n", b":1\r\n", b"$1\r\nd\r\n"])
    async def test_more_or_fewer_answers_than_asked_for_are_none(
        self, dial: Dial, fake_store: FakeStore, answer: bytes
    ) -> None:
        def script(sock: socket.socket) -> None:
            while sock.recv(4096):
                sock.sendall(answer)

        client = dial(fake_store(script).address)
        assert await client.exists_many([b"a", b"b"]) == [False, False]
        assert client.counts["exists", "protocol"] == 1

    async def test_a_reply_too_many_is_never_taken_for_the_next_calls(self, dial: Dial, fake_store: FakeStore) -> None:
        def script(sock: socket.socket) -> None:
            while sock.recv(4096):
                sock.sendall(b"$-1\r\n$-1\r\n")

        server = fake_store(script)
        client = dial(server.address)
        for _ in range(3):
            assert (await client.get_into(b"k", bytearray(1))).reason is MissReason.ABSENT
        assert server.connections == 3

    @pytest.mark.parametrize("answer", [b"", b"$264\r\n" + bytes(100)])
    async def test_case_2_a_reply_dropped_or_cut_is_a_miss(
        self, dial: Dial, fake_store: FakeStore, answer: bytes
    ) -> None:
        def script(sock: socket.socket) -> None:
            sock.recv(1000)
            sock.sendall(answer)
            sock.close()

        client = dial(fake_store(script).address)
        assert (await client.get_into(b"k", bytearray(1000))).reason is MissReason.UNREACHABLE
        assert client.counts["get", "unreachable"] == 1

    async def test_a_store_that_was_restarted_is_asked_again_at_once(
        self, start_store: Callable[..., StoreServer], dial: Dial
    ) -> None:
        store = start_store()
        client = dial(store.address)
        assert await client.ping() is None
        store.stop()
        start_store(listen=store.address)
        assert await client.ping() is None
        assert client.counts == {("ping", "ok"): 2}

    async def test_calls_after_close_miss(self, aclient: AsyncStoreClient) -> None:
        assert await aclient.ping() is None
        aclient.close()
        assert await aclient.ping() is MissReason.UNREACHABLE


class TestSecurity:
    async def test_over_tls_to_a_store_whose_certificate_is_trusted(
        self, start_store: Callable[..., StoreServer], dial: Dial, tmp_path: Path
    ) -> None:
        authority, other = trustme.CA(), trustme.CA()
        leaf = authority.issue_cert("127.0.0.1")
        leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
        for number, pem in enumerate(leaf.cert_chain_pems):
            pem.write_to_path(tmp_path / "chain.pem", append=number > 0)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        other.cert_pem.write_to_path(tmp_path / "other.pem")
        store = start_store(tls_certificate=tmp_path / "chain.pem", tls_key=tmp_path / "key.pem")
        client = dial(store.address, tls=TlsSettings(ca=tmp_path / "ca.pem"))
        row, buffer = os.urandom(3 * MIB), bytearray(3 * MIB)
        assert (await client.put(b"k", Header(), row)).stored
        assert (await client.get_into(b"k", buffer)).hit
        assert buffer == row
        assert await client.match([b"k", b"l"]) == 1
        stranger = dial(store.address, tls=TlsSettings(ca=tmp_path / "other.pem"))
        assert await stranger.ping() is MissReason.UNREACHABLE
        assert await dial(store.address).ping(timeout_seconds=2.0) is not None  # it speaks no TLS

    async def test_a_user_of_a_store_with_users(self, dial: Dial, fake_store: FakeStore) -> None:
        heard: list[bytes] = []

        def script(sock: socket.socket) -> None:
            while data := sock.recv(4096):
                heard.append(data)
                sock.sendall(b"+OK\r\n")

        address = fake_store(script).address
        assert await dial(address, password="secret", user="engine").ping() is None
        assert await dial(address, password="secret").ping() is None
        ping = encode_command(b"PING")
        logins = [encode_command(b"AUTH", b"engine", b"secret"), encode_command(b"AUTH", b"secret")]
        assert heard == [logins[0], ping, logins[1], ping]


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

    @pytest.mark.parametrize("behaviour", ["silent", "dripping", "half", "sipping"])
    @pytest.mark.parametrize("call", ["get", "put"])
    async def test_case_2_a_stalling_store_costs_a_call_its_deadline_and_no_more(
        self, dial: Dial, fake_store: FakeStore, behaviour: str, call: str
    ) -> None:
        server = fake_store(getattr(self, behaviour))
        client = dial(server.address, timeout_seconds=0.15)
        if call == "get":
            reason = (await client.get_into(b"k", bytearray(1000))).reason
        else:
            reason = (await client.put(b"k", Header(), bytes(32 * MIB))).reason
        assert reason is MissReason.TIMEOUT or (call, behaviour) == ("put", "dripping")
        # The connection may still have a reply under way: it must not serve another call.
        await client.ping(timeout_seconds=0.05)
        await wait_until(lambda: server.connections == 2)

    async def test_all_connections_taken_until_the_deadline(self, dial: Dial, fake_store: FakeStore) -> None:
        server = fake_store(self.silent)
        client = dial(server.address, max_connections=1)
        other = asyncio.create_task(client.ping(timeout_seconds=0.4))
        await wait_until(lambda: server.connections == 1)
        assert await client.ping(timeout_seconds=0.05) is MissReason.BUSY
        assert await other is MissReason.TIMEOUT

    async def test_there_are_never_more_connections_than_the_bound(self, store: StoreServer, dial: Dial) -> None:
        client = dial(store.address, max_connections=2)
        assert await asyncio.gather(*(client.ping() for _ in range(30))) == [None] * 30
        page = parse_exposition(store.registry.expose().decode())
        assert page["kvhearth_store_connections_opened_total"][()] <= 2


class TestCancellation:
    async def test_a_cancelled_get_closes_its_connection_and_writes_nothing_more(
        self, dial: Dial, fake_store: FakeStore
    ) -> None:
        go_on, closed = threading.Event(), threading.Event()

        def script(sock: socket.socket) -> None:
            while request := sock.recv(1000):
                if b"PING" in request:
                    sock.sendall(b"+PONG\r\n")
                    continue
                sock.sendall(b"$100064\r\n" + b"x" * 50_000)
                go_on.wait(SECONDS)
                try:
                    while True:
                        sock.sendall(b"y" * 10_000)
                except OSError:
                    closed.set()
                    return

        client = dial(fake_store(script).address, max_connections=1)
        buffer = bytearray(100_000)
        call = asyncio.create_task(client.get_into(b"k", buffer))
        await wait_until(lambda: buffer.count(b"x") > 40_000)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go_on.set()
        await wait_until(closed.is_set)
        assert b"y" not in buffer
        assert await client.ping() is None  # its place in the pool is free again
        assert not client.is_down

    async def test_a_cancelled_put_closes_its_connection_and_lets_go_of_the_row(
        self, dial: Dial, fake_store: FakeStore
    ) -> None:
        stalled, closed = threading.Event(), threading.Event()

        def script(sock: socket.socket) -> None:
            sock.recv(1000)
            stalled.set()
            while sock.recv(MIB):
                time.sleep(0.001)
            closed.set()

        client = dial(fake_store(script).address, max_connections=1)
        row = bytearray(64 * MIB)
        call = asyncio.create_task(client.put(b"k", Header(), row))
        await wait_until(stalled.is_set)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        del call
        await wait_until(closed.is_set)
        gc.collect()
        row += b"grown"  # BufferError while anything still looks at it

    async def test_calls_cancelled_while_they_wait_take_no_place(self, dial: Dial, store: StoreServer) -> None:
        client = dial(store.address, max_connections=1)
        for _ in range(20):
            calls = [asyncio.create_task(client.ping()) for _ in range(5)]
            await asyncio.sleep(0)
            for call in calls[1:4]:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert await client.ping(timeout_seconds=SECONDS) is None
