"""The server as Redis clients see it: redis-cli, redis-py, and raw sockets that behave badly."""

from __future__ import annotations

import fnmatch
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvhearth.errors import UserError
from kvhearth.metrics import parse_exposition
from kvhearth.store.client.wire import encode_command
from kvhearth.store.protocol.address import connect
from kvhearth.store.protocol.header import HEADER_BYTES, Header
from kvhearth.store.server import connection
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

MIB = 2**20
SECONDS = 10.0


def open_socket(store: StoreServer) -> socket.socket:
    sock = connect(store.addresses[0], SECONDS)
    sock.settimeout(SECONDS)
    return sock


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65_536):
        data += piece
    return data


def ask(sock: socket.socket, *args: bytes) -> bytes:
    sock.sendall(encode_command(*args))
    return sock.recv(65_536)


def eventually(check: Callable[[], bool]) -> None:
    give_up = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.01)


def figures(store: StoreServer) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    return parse_exposition(store.registry.expose().decode())


class TestWithRedisCli:
    def run(self, redis_cli: str, store: StoreServer, *args: str, stdin: str | None = None) -> str:
        command = [redis_cli, "-p", str(store.addresses[0].port), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, input=stdin, check=True)
        return done.stdout.strip()

    @pytest.mark.parametrize("protocol", [[], ["-3"]])
    def test_the_everyday_commands(self, redis_cli: str, store: StoreServer, protocol: list[str]) -> None:
        def run(*args: str) -> str:
            return self.run(redis_cli, store, *protocol, *args)

        assert run("ping") == "PONG"
        assert run("set", "k", "v") == "OK"
        assert run("get", "k") == "v"
        assert run("get", "absent") == ""
        assert run("mget", "k", "absent", "k") == "v\n\nv"
        assert run("exists", "k", "k", "absent") == "2"
        assert run("strlen", "k") == "1"
        assert run("kv.match", "k", "absent", "k") == "d"
        assert run("kv.exists", "k", "absent", "k") == "d-d"
        assert run("kv.pin", "60", "k", "absent") == "1"
        assert run("kv.unpin", "k", "absent") == "1"
        assert run("dbsize") == "1"
        assert run("del", "k") == "1"
        assert run("echo", "hello there") == "hello there"
        assert run("select", "0") == "OK"
        assert run("flushdb") == "OK"
        assert run("flushall") == "OK"
        assert "used_memory:0" in run("info", "memory")
        assert run("command", "count") == str(len(run("command", "docs").split("generic")) - 1)

    def test_an_interactive_session(self, redis_cli: str, store: StoreServer) -> None:
        said = self.run(redis_cli, store, stdin="set a 1\nget a\nclient getname\nclient setname me\nclient getname\n")
        assert said.splitlines() == ["OK", "1", "", "OK", "me"]

    @pytest.mark.parametrize(
        ("args", "error"),
        [
            (["lpush", "k", "v"], "ERR unknown command 'lpush', with args beginning with: 'k' 'v'"),
            (["get"], "ERR wrong number of arguments for 'get' command"),
            (["set", "k"], "ERR wrong number of arguments for 'set' command"),
            (["set", "k", "v", "get"], "ERR syntax error"),
            (["select", "1"], "ERR DB index is out of range"),
            (["hello", "4"], "NOPROTO unsupported protocol version"),
            (["auth", "secret"], "ERR AUTH <password> called without any password configured"),
            (["auth", "nobody", "secret"], "WRONGPASS invalid username-password pair or user is disabled."),
            (["kv.pin"], "ERR wrong number of arguments for 'kv.pin' command"),
            (["set", "k" * 600, "v"], "ERR key of 600 bytes is longer than 512"),
        ],
    )
    def test_what_is_not_supported_is_answered_in_rediss_words(
        self, redis_cli: str, store: StoreServer, args: list[str], error: str
    ) -> None:
        assert self.run(redis_cli, store, *args).startswith(error)


class TestWithRedisPy:
    def test_patterns_of_settings_leave_nothing_behind(self, redis_py: redis.Redis) -> None:
        kept = fnmatch._compile_pattern.cache_info().currsize  # type: ignore[attr-defined]
        assert set(redis_py.config_get("max*")) == {"maxmemory", "maxmemory-policy", "maxclients"}
        assert set(redis_py.config_get("save", "data[b]ases")) == {"save", "databases"}
        assert redis_py.config_get("*" * 200) == {}  # no setting has so long a name
        assert fnmatch._compile_pattern.cache_info().currsize == kept  # type: ignore[attr-defined]

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_both_protocols(self, store: StoreServer, protocol: int) -> None:
        with redis.Redis(port=store.addresses[0].port, protocol=protocol, client_name="me", db=0) as client:
            assert client.ping()
            assert client.set("k", "v")
            assert client.get("k") == b"v"
            assert client.get("absent") is None
            assert client.mget("k", "absent") == [b"v", None]
            assert client.client_getname() in ("me", b"me")
            assert client.client_info()["lib-name"].startswith("redis-py")
            assert client.execute_command("KV.MATCH", "k", "absent") == b"d"
            assert client.info("stats")["keyspace_hits"] == 2
            assert "get" in client.command()
            assert client.command_count() == len(client.command())
            with pytest.raises(redis.ResponseError, match="unknown command 'LPUSH'"):
                client.lpush("k", "v")

    def test_values_of_every_length_come_back_as_they_went(self, redis_py: redis.Redis) -> None:
        lengths = [0, 1, 4095, 4096, 4097, 65_535, 65_536, 100_000, MIB, MIB + 1]
        values = {f"k{n}": (b"%d;" % n * (n // 2 + 1))[:n] for n in lengths}
        for key, value in values.items():
            redis_py.set(key, value)
        assert redis_py.mget(list(values)) == list(values.values())

    def test_a_pipeline_with_errors_in_it_goes_on(self, start_store: Callable[..., StoreServer]) -> None:
        store = start_store(max_value_bytes=100_000)
        with redis.Redis(port=store.addresses[0].port) as client:
            pipe = client.pipeline(transaction=False)
            for number in range(500):
                pipe.set(f"k{number}", b"%d" % number * 50)
            pipe.set("large", bytes(200_000))
            pipe.execute_command("NOSUCH")
            for number in range(500):
                pipe.get(f"k{number}")
            answers = pipe.execute(raise_on_error=False)
        assert answers[:500] == [True] * 500
        assert "string exceeds maximum allowed size: 200000 bytes" in str(answers[500])
        assert "unknown command 'NOSUCH'" in str(answers[501])
        assert answers[502:] == [b"%d" % number * 50 for number in range(500)]

    def test_the_oldest_values_make_room_and_memory_stays_within_its_bound(
        self, redis_py: redis.Redis, store: StoreServer
    ) -> None:
        for number in range(40):
            redis_py.set(f"k{number}", bytes(MIB // 2))
        stats = store.store.table.stats()
        assert stats.used_bytes == stats.capacity_bytes == 8 * MIB
        assert (stats.items, stats.evictions) == (16, 24)
        assert [bool(redis_py.exists(f"k{number}")) for number in (0, 23, 24, 39)] == [False, False, True, True]


class TestPins:
    def test_pinned_values_stay_whatever_comes(self, redis_py: redis.Redis, store: StoreServer) -> None:
        for number in range(8):
            redis_py.set(f"pinned{number}", bytes([number]) * (MIB // 2 - 100))
        assert redis_py.execute_command("KV.PIN", 60, *[f"pinned{number}" for number in range(8)]) == 8
        for number in range(100):
            assert redis_py.set(f"k{number}", bytes(MIB // 2))
        values = redis_py.mget([f"pinned{number}" for number in range(8)])
        assert values == [bytes([number]) * (MIB // 2 - 100) for number in range(8)]
        memory = redis_py.info("memory")
        assert memory["pinned_bytes"] == memory["max_pinned_bytes"] == 4 * MIB
        assert figures(store)["kvhearth_store_pinned_bytes"][()] == 4 * MIB

    def test_pinning_more_than_half_of_the_store_is_refused_by_name_and_the_rest_stays_pinned(
        self, redis_py: redis.Redis
    ) -> None:
        for number in range(16):
            redis_py.set(f"k{number}", bytes(MIB // 2))
        assert redis_py.execute_command("KV.PIN", 60, *[f"k{number}" for number in range(8)]) == 8
        with pytest.raises(redis.ResponseError, match="half of this store, 4194304 bytes and 2048 values"):
            redis_py.execute_command("KV.PIN", 60, "k8")
        assert redis_py.execute_command("KV.PIN", 60, "k0", "absent") == 1
        assert redis_py.execute_command("KV.UNPIN", "k0", "k1", "k8") == 2
        assert redis_py.execute_command("KV.PIN", 60, "k8", "k9") == 2

    def test_deleting_and_flushing_drop_pins(self, redis_py: redis.Redis) -> None:
        for command in (("DEL", "k"), ("FLUSHALL",)):
            redis_py.set("k", "v")
            assert redis_py.execute_command("KV.PIN", 60, "k") == 1
            redis_py.execute_command(*command)
            assert redis_py.info("memory")["pinned_bytes"] == 0
            assert redis_py.execute_command("KV.UNPIN", "k") == 0


class TestGroups:
    def test_info_and_metrics_say_what_each_group_has(self, redis_py: redis.Redis, store: StoreServer) -> None:
        for key, group, length in ((b"a", 0xBEEF, 1000), (b"b", 0xBEEF, 500), (b"c", 0, 10)):
            row = bytes(length)
            redis_py.set(key, Header(group=group).sealed(key, row).pack() + row)
        redis_py.set("no row", "as any Redis client puts it")
        redis_py.set("empty", "")
        shares = redis_py.info("groups")
        assert shares["group_0000beef"] == {"bytes": 1500 + 2 * HEADER_BYTES, "values": 2}
        assert shares["group_00000000"] == {"bytes": 10 + HEADER_BYTES + 27, "values": 3}
        page = figures(store)
        assert page["kvhearth_store_group_bytes"][(("group", "0000beef"),)] == 1500 + 2 * HEADER_BYTES
        assert page["kvhearth_store_group_values"][(("group", "00000000"),)] == 3
        redis_py.delete("a", "b")
        assert "group_0000beef" not in redis_py.info("groups")

    def test_a_thousand_groups_are_sixty_four_and_the_others(self, redis_py: redis.Redis, store: StoreServer) -> None:
        pipe = redis_py.pipeline(transaction=False)
        for group in range(1000):
            key = b"%d" % group
            pipe.set(key, Header(group=group).sealed(key, b"").pack())
        pipe.execute()
        shares = redis_py.info("groups")
        assert len(shares) == 65
        assert shares["group_other"] == {"bytes": 936 * HEADER_BYTES, "values": 936}
        assert len(figures(store)["kvhearth_store_group_bytes"]) == 65


class TestPassword:
    @pytest.fixture
    def locked(self, start_store: Callable[..., StoreServer]) -> StoreServer:
        return start_store(password="open sesame")

    def test_who_does_not_log_in_soon_is_cut_whatever_the_idle_timeout(
        self, locked: StoreServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "_LOGIN_SECONDS", 0.2)
        with open_socket(locked) as silent, open_socket(locked) as known:
            assert ask(known, b"AUTH", b"open sesame") == b"+OK\r\n"
            assert read_to_end(silent) == b""
            assert ask(known, b"PING") == b"+PONG\r\n"

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_the_right_password_opens_the_store(self, locked: StoreServer, protocol: int) -> None:
        with redis.Redis(port=locked.addresses[0].port, password="open sesame", protocol=protocol) as client:
            assert client.set("k", "v")

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_a_wrong_password_does_not(self, locked: StoreServer, protocol: int) -> None:
        with (
            redis.Redis(
                port=locked.addresses[0].port, password="guess", protocol=protocol, retry=Retry(NoBackoff(), 0)
            ) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()

    @pytest.mark.parametrize(
        "args",
        [(b"GET", b"k"), (b"SET", b"k", b"v"), (b"INFO",), (b"KV.PIN", b"9", b"k"), (b"NOSUCH",), (b"HELLO", b"3")],
    )
    def test_without_one_nothing_is_answered(self, locked: StoreServer, args: tuple[bytes, ...]) -> None:
        with open_socket(locked) as sock:
            assert ask(sock, *args).startswith(b"-NOAUTH")
        assert len(locked.store.table) == 0

    def test_without_one_no_memory_is_spent_on_a_value(self, locked: StoreServer) -> None:
        with open_socket(locked) as sock:
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n")
            assert read_to_end(sock) == (
                b"-NOAUTH Authentication required.\r\n-ERR Protocol error: invalid bulk length\r\n"
            )


class TestBadClients:
    @pytest.mark.parametrize(
        "garbage",
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"*1\r\n$99999999999\r\n"],
    )
    def test_what_is_no_redis_protocol_is_told_so_and_cut_off(self, store: StoreServer, garbage: bytes) -> None:
        with open_socket(store) as sock:
            sock.sendall(garbage)
            assert read_to_end(sock).startswith(b"-ERR Protocol error: ")

    def test_it_is_told_so_even_while_it_goes_on_sending(self, store: StoreServer) -> None:
        with open_socket(store) as sock:
            sock.sendall(b"garbage" * 500_000)
            assert read_to_end(sock).startswith(b"-ERR Protocol error: ")

    def test_what_came_before_the_garbage_is_answered(self, store: StoreServer) -> None:
        with open_socket(store) as sock:
            sock.sendall(encode_command(b"PING") + b"garbage")
            assert read_to_end(sock).startswith(b"+PONG\r\n-ERR Protocol error: ")

    def test_a_bare_ping_is_answered_however_it_arrives(self, store: StoreServer) -> None:
        with open_socket(store) as sock:
            for piece in (b"PI", b"NG\r", b"\nPING\r\n"):
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
            assert read_to_end(sock) == b"+PONG\r\n" * 2

    def test_quit_says_goodbye(self, store: StoreServer) -> None:
        with open_socket(store) as sock:
            sock.sendall(encode_command(b"QUIT") + encode_command(b"PING"))
            assert read_to_end(sock).startswith(b"+OK\r\n")

    def test_random_bytes_neither_crash_nor_hang_it(self, store: StoreServer) -> None:
        tokens = [
            b"*",
            b"$",
            b"\r\n",
            b"3",
            b"-1",
            b"SET",
            b"GET",
            b"MGET",
            b"HELLO",
            b"CLIENT",
            b"COMMAND",
            b"0",
            b"99",
        ]

        @settings(max_examples=60, deadline=None)
        @given(st.lists(st.one_of(st.sampled_from(tokens), st.binary(max_size=8)), max_size=30).map(b"".join))
        def send(data: bytes) -> None:
            with open_socket(store) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                read_to_end(sock)

        send()
        with open_socket(store) as sock:
            assert ask(sock, b"PING") == b"+PONG\r\n"
        eventually(lambda: figures(store)["kvhearth_store_connections"][()] == 0)

    def test_a_value_of_which_half_came_is_never_seen_and_its_memory_comes_back(self, store: StoreServer) -> None:
        with open_socket(store) as sock:
            ask(sock, b"SET", b"k", b"old")
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n" + bytes(500_000))
            eventually(lambda: store.store.table.stats().uploading_bytes > 0)
            with open_socket(store) as other:
                assert ask(other, b"GET", b"k") == b"$3\r\nold\r\n"
        eventually(lambda: store.store.table.stats().uploading_bytes == 0)
        with open_socket(store) as other:
            assert ask(other, b"GET", b"k") == b"$3\r\nold\r\n"

    @pytest.mark.parametrize("where", ["listen", "unix"])
    @pytest.mark.parametrize(
        ("sent", "reason"),
        [
            (b"", "idle"),
            (b"*2\r\n$3\r\nGET\r\n", "stalled"),
            (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n" + bytes(1000), "stalled"),
            (encode_command(b"MGET", *[b"big"] * 100), "stalled"),
        ],
        ids=["silent", "half a command", "half a value", "never reads"],
    )
    def test_a_client_that_stalls_is_cut_and_holds_nothing(
        self, start_store: Callable[..., StoreServer], tmp_path: Path, where: str, sent: bytes, reason: str
    ) -> None:
        place = {"unix": tmp_path / "s", "listen": None} if where == "unix" else {}
        store = start_store(idle_timeout_seconds=0.3, stall_timeout_seconds=0.2, **place)
        with open_socket(store) as sock:
            ask(sock, b"SET", b"big", bytes(MIB))
        with open_socket(store) as sock:
            sock.sendall(sent)
            cut = (("reason", reason),)
            eventually(lambda: figures(store).get("kvhearth_store_connections_cut_total", {}).get(cut, 0) >= 1)
            eventually(lambda: figures(store)["kvhearth_store_connections"][()] == 0)
        assert store.store.table.stats().uploading_bytes == 0
        store.store.table.clear()
        assert store.store.table.stats().used_bytes == 0

    def test_one_client_too_many_is_told_so(self, start_store: Callable[..., StoreServer]) -> None:
        store = start_store(max_connections=2)
        with open_socket(store) as one, open_socket(store) as two:
            assert ask(one, b"PING") == ask(two, b"PING") == b"+PONG\r\n"
            with open_socket(store) as three:
                assert read_to_end(three) == b"-ERR max number of clients reached\r\n"
        eventually(lambda: figures(store)["kvhearth_store_connections"][()] == 0)
        with open_socket(store) as again:
            assert ask(again, b"PING") == b"+PONG\r\n"


def test_readers_and_writers_at_once_never_see_wrong_bytes(start_store: Callable[..., StoreServer]) -> None:
    store = start_store(capacity_bytes=2 * MIB)  # half of what the keys need: every get races an eviction
    wrong: list[bytes] = []
    hits = [0]
    stop = threading.Event()

    def value_of(key: bytes, version: int) -> bytes:
        return (key + b"%08d" % version) * 12_000

    def work(seed: int) -> None:
        with redis.Redis(port=store.addresses[0].port) as client:
            version = seed
            while not stop.is_set():
                version += 1
                key = b"key%02d" % (version * 7 % 30)
                client.set(key, value_of(key, version))
                key = b"key%02d" % (version * 11 % 30)
                got = client.get(key)
                if got is not None:
                    hits[0] += 1
                    if got != value_of(key, int(got[5:13])):
                        wrong.append(key)

    threads = [threading.Thread(target=work, args=(seed * 1_000_000,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: hits[0] > 150 or bool(wrong))
    stop.set()
    for thread in threads:
        thread.join(SECONDS)
    assert not wrong
    assert store.store.table.stats().evictions > 0


def test_a_slow_reader_gets_the_value_it_asked_for_though_it_is_long_gone(store: StoreServer) -> None:
    value = bytes(range(256)) * (4 * MIB // 256)
    with open_socket(store) as slow, open_socket(store) as other:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        other.sendall(encode_command(b"SET", b"k", value))
        assert other.recv(100) == b"+OK\r\n"
        slow.sendall(encode_command(b"GET", b"k"))
        assert slow.recv(9) == b"$4194304\r"
        assert ask(other, b"DEL", b"k") == b":1\r\n"
        for number in range(30):
            other.sendall(encode_command(b"SET", b"%d" % number, b"\xff" * (MIB // 2)))
            assert other.recv(100).startswith((b"+OK", b"-OOM"))
        received = b""
        while len(received) < len(value) + 3:
            received += slow.recv(MIB)
        assert received == b"\n" + value + b"\r\n"


def test_metrics_count_what_happened(store: StoreServer) -> None:
    with open_socket(store) as sock:
        for args in ((b"SET", b"k", bytes(100)), (b"GET", b"k"), (b"GET", b"x"), (b"NOSUCH",), (b"GET",)):
            ask(sock, *args)
    eventually(lambda: figures(store)["kvhearth_store_connections"][()] == 0)
    page = figures(store)
    commands = {tuple(value for _, value in labels): n for labels, n in page["kvhearth_store_commands_total"].items()}
    assert commands == {("get", "error"): 1, ("get", "ok"): 2, ("set", "ok"): 1, ("unknown", "error"): 1}
    assert page["kvhearth_store_hits_total"][()] == page["kvhearth_store_misses_total"][()] == 1
    assert page["kvhearth_store_value_bytes"][()] == 100
    assert page["kvhearth_store_received_bytes_total"][()] > 100 < page["kvhearth_store_sent_bytes_total"][()]


def test_memory_is_faulted_in_before_the_first_client_with_progress() -> None:
    seen: list[tuple[int, int]] = []
    with StoreServer(StoreConfig(capacity_bytes=8 * MIB, listen="127.0.0.1:0"), lambda *step: seen.append(step)):
        assert seen[-1] == (8 * MIB, 8 * MIB)


def test_a_stopped_server_has_let_go_of_everything(start_store: Callable[..., StoreServer], tmp_path: Path) -> None:
    before = threading.active_count()
    store = start_store(unix=tmp_path / "s", http_listen="127.0.0.1:0")
    port = store.addresses[0].port
    with open_socket(store) as sock:
        ask(sock, b"PING")
        store.stop()
        assert read_to_end(sock) == b""
    assert not list(tmp_path.iterdir())
    assert threading.active_count() <= before  # one of an earlier test may have ended meanwhile
    start_store(listen=f"127.0.0.1:{port}")


def test_a_taken_port_is_named_with_a_remedy_and_nothing_is_left(store: StoreServer, tmp_path: Path) -> None:
    config = StoreConfig(capacity_bytes=8 * MIB, listen=store.address, unix=tmp_path / "s")
    with pytest.raises(UserError, match=f"listen: {store.address} is already in use; stop the process"):
        StoreServer(config).start()
    assert not list(tmp_path.iterdir())


def test_more_memory_than_there_is_is_refused_at_start(start_store: Callable[..., StoreServer]) -> None:
    with pytest.raises(UserError, match=r"capacity: cannot hold 256 TiB: .*; lower it"):
        start_store(capacity_bytes=2**48)
