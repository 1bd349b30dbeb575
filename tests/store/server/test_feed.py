"""Whoever follows the store's events knows what it has: from a snapshot on, or from where they were."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from kvhearth.store.client.wire import encode_command
from kvhearth.store.dram.allocator import PAGE_BYTES
from kvhearth.store.dram.events import LOG_EVENTS, EventKind
from kvhearth.store.protocol.address import connect
from kvhearth.store.protocol.packed import unpack_keys
from kvhearth.store.server import connection, feed
from kvhearth.store.server.server import StoreServer

from ..fakes import eventually, in_threads, put

SECONDS = 10.0
MIB = 2**20


class FollowerSocket:
    """A connection that has sent KV.EVENTS, read message by message."""

    def __init__(self, store: StoreServer, *args: str | bytes, before: bytes = b"") -> None:
        self.sock = connect(store.addresses[0], SECONDS)
        self.sock.settimeout(SECONDS)
        self.file = self.sock.makefile("rb")
        words = [word.encode() if isinstance(word, str) else word for word in args]
        self.sock.sendall(before + encode_command(b"KV.EVENTS", *words))

    def read(self) -> Any:
        line = self.file.readline()
        assert line, "the connection ended"
        kind, rest = line[:1], line[1:-2]
        if kind in b"*>":
            return [self.read() for _ in range(int(rest))]
        if kind == b"$":
            return self.file.read(int(rest) + 2)[:-2] if rest != b"-1" else None
        return int(rest) if kind == b":" else line.strip()

    def read_until(self, kind: bytes) -> list[list[Any]]:
        """Messages up to the first of ``kind``."""
        messages = [self.read()]
        while messages[-1][0] != kind:
            messages.append(self.read())
        return messages

    def close(self) -> None:
        self.file.close()
        self.sock.close()


@pytest.fixture
def follow(store: StoreServer) -> Iterator[Callable[..., FollowerSocket]]:
    """Follows `store`, or another that is given."""
    opened: list[FollowerSocket] = []

    def make(*args: str | bytes, of: StoreServer = store, before: bytes = b"") -> FollowerSocket:
        opened.append(FollowerSocket(of, *args, before=before))
        return opened[-1]

    yield make
    for follower in opened:
        follower.close()


Follow = Callable[..., FollowerSocket]


class Mirror:
    """What a follower makes of the messages: the keys of each tier."""

    def __init__(self) -> None:
        self.keys: dict[bytes, set[bytes]] = {}
        self.sequence = 0
        self.live = False

    def apply(self, message: list[Any]) -> None:
        match message:
            case [b"hello", _, sequence] | [b"ping", sequence]:
                pass
            case [b"gap", sequence]:
                self.keys, self.live = {}, False
            case [b"live", sequence]:
                self.live = True
            case [b"snapshot" | b"put", sequence, tier, keys]:
                self.keys.setdefault(tier, set()).update(unpack_keys(keys))
            case [b"evict", sequence, tier, keys]:
                self.keys.setdefault(tier, set()).difference_update(unpack_keys(keys))
            case [b"clear", sequence, tier]:
                self.keys[tier] = set()
            case _:
                raise AssertionError(message)
        assert sequence >= self.sequence
        self.sequence = sequence

    @property
    def in_memory(self) -> set[bytes]:
        return self.keys.get(b"d", set())


def server_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


class TestEvents:
    def test_a_follower_gets_what_is_there_and_then_what_happens(
        self, store: StoreServer, redis_py: redis.Redis, follow: Follow
    ) -> None:
        redis_py.mset({"n:a": "1", "n:b": "2", "n:long": "3"})
        follower = follow()
        boot_id = store.store.table.events.boot_id.encode()
        assert follower.read() == [b"hello", boot_id, 3]
        snapshot = follower.read_until(b"live")
        assert snapshot.pop() == [b"live", 3]
        assert all(message[:3] == [b"snapshot", 3, b"d"] for message in snapshot)
        keys = [key for message in snapshot for key in unpack_keys(message[3])]
        assert sorted(keys) == [b"n:a", b"n:b", b"n:long"]
        redis_py.set("n:c", "4")
        assert follower.read() == [b"put", 4, b"d", b"\0KVK\x03\0n:c"]
        redis_py.delete("n:a")
        assert follower.read() == [b"evict", 5, b"d", b"\0KVK\x03\0n:a"]
        redis_py.set("n:c", "5")  # put anew: it is there, as it was
        assert follower.read() == [b"put", 6, b"d", b"\0KVK\x03\0n:c"]
        redis_py.flushdb()
        assert follower.read() == [b"clear", 7, b"d"]

    def test_in_resp3_they_are_pushed(self, redis_py: redis.Redis, follow: Follow) -> None:
        follower = follow(before=encode_command(b"HELLO", b"3"))
        assert follower.file.readline() == b"%7\r\n"
        while (line := follower.file.readline()) != b">3\r\n":
            assert line
        assert [follower.read(), follower.read(), follower.read()][0] == b"hello"
        redis_py.set("k", "v")
        assert follower.read_until(b"put")[-1][1] == 1

    def test_a_value_that_was_evicted_or_has_expired_is_told(
        self, start_store: Callable[..., StoreServer], follow: Follow
    ) -> None:
        store = start_store(capacity_bytes=MIB)
        follower = follow(of=store)
        mirror = Mirror()
        with redis.Redis(port=store.addresses[0].port) as client:
            client.set("brief", "v", px=1)
            eventually(lambda: client.get("brief") is None)
            for number in range(10):
                client.set(f"k{number}", bytes(MIB // 4))
            client.set("last", "v")
        while b"last" not in mirror.in_memory:
            mirror.apply(follower.read())
        assert b"brief" not in mirror.in_memory
        assert len(mirror.in_memory) == len(store.store.table) < 11

    def test_a_put_over_a_value_that_is_then_refused_tells_that_the_value_is_gone(
        self, start_store: Callable[..., StoreServer], follow: Follow
    ) -> None:
        store = start_store(namespace_quota_bytes=100)
        follower = follow(of=store)
        with redis.Redis(port=store.addresses[0].port) as client:
            client.set("n:k", "v")
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.set("n:k", bytes(200))
            assert client.get("n:k") is None
        messages = follower.read_until(b"put")
        assert messages[-1][0] == b"put"
        assert follower.read()[0] == b"evict"

    def test_one_namespace_can_be_followed_alone(self, redis_py: redis.Redis, follow: Follow) -> None:
        redis_py.mset({"ours:1": "v", "theirs:1": "v"})
        follower = follow("NAMESPACE", "ours")
        mirror = Mirror()
        redis_py.mset({"theirs:2": "v", "ours:2": "v"})
        while mirror.in_memory != {b"ours:1", b"ours:2"}:
            mirror.apply(follower.read())
        redis_py.delete("theirs:1", "theirs:2", "ours:1")
        while mirror.in_memory != {b"ours:2"}:
            mirror.apply(follower.read())
        assert mirror.sequence == 7

    def test_a_quiet_store_says_that_it_is_there(
        self, monkeypatch: pytest.MonkeyPatch, redis_py: redis.Redis, follow: Follow
    ) -> None:
        monkeypatch.setattr(feed, "_PING_SECONDS", 0.05)
        monkeypatch.setattr(connection, "_FEED_SECONDS", 0.05)
        redis_py.set("k", "v")
        follower = follow("NAMESPACE", "ours")
        assert follower.read_until(b"ping")[-1] == [b"ping", 1]

    def test_who_follows_one_namespace_hears_something_while_others_are_busy(
        self, monkeypatch: pytest.MonkeyPatch, store: StoreServer, redis_py: redis.Redis, follow: Follow
    ) -> None:
        monkeypatch.setattr(feed, "_PING_SECONDS", 0.05)
        follower = follow("NAMESPACE", "ours")
        follower.read_until(b"live")
        running = threading.Event()
        running.set()

        def keep_busy() -> None:
            with redis.Redis(port=store.addresses[0].port) as other:
                while running.is_set():
                    other.set("theirs:k", "v")

        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            assert all(follower.read()[0] == b"ping" for _ in range(3))
        finally:
            running.clear()
            busy.join()

    @pytest.mark.parametrize(
        "args", [["FROM"], ["FROM", "x"], ["FROM", "x", "y"], ["NAMESPACE"], ["SINCE", "1"], ["FROM", "x", "-1"]]
    )
    def test_wrong_options_are_a_syntax_error_and_the_connection_goes_on(self, follow: Follow, args: list[str]) -> None:
        follower = follow(*args)
        assert follower.read() == b"-ERR syntax error"
        follower.sock.sendall(encode_command(b"PING"))
        assert follower.read() == b"+PONG"


class TestGoingOn:
    def test_a_follower_that_comes_back_goes_on_where_it_was(
        self, store: StoreServer, redis_py: redis.Redis, follow: Follow
    ) -> None:
        first = follow()
        _, boot_id, _ = first.read()
        first.close()
        redis_py.mset({"a": "1", "b": "2", "c": "3"})
        follower = follow("FROM", boot_id, "1")
        assert follower.read() == [b"hello", boot_id, 3]
        assert follower.read() == [b"live", 1]
        assert follower.read() == [b"put", 3, b"d", b"\0KVK\x01\0bc"]

    def test_with_another_stores_life_it_begins_anew(self, redis_py: redis.Redis, follow: Follow) -> None:
        redis_py.set("a", "1")
        follower = follow("FROM", "0123456789abcdef", "0")
        assert [message[0] for message in follower.read_until(b"live")] == [b"hello", b"snapshot", b"live"]

    @pytest.mark.parametrize("number", ["0", "999999999"])
    def test_too_far_behind_or_ahead_it_begins_anew(self, store: StoreServer, follow: Follow, number: str) -> None:
        events = store.store.table.events
        for _ in range(LOG_EVENTS + 1):
            events.append(EventKind.EVICT, b"d", b"gone")
        put(store.store, b"a", b"1")
        follower = follow("FROM", events.boot_id, number)
        assert [message[0] for message in follower.read_until(b"live")] == [b"hello", b"snapshot", b"live"]

    def test_one_that_falls_too_far_behind_is_told_of_the_gap_and_begins_anew(
        self, store: StoreServer, follow: Follow
    ) -> None:
        follower = follow()
        follower.read_until(b"live")
        events = store.store.table.events
        with events._lock:  # while it waits for this, more happens than is kept
            put_all = [(EventKind.EVICT, b"d", b"gone")] * (LOG_EVENTS + 1)
            events._events.extend(put_all)  # type: ignore[arg-type]
            events._last += len(put_all)
        put(store.store, b"a", b"1")
        messages = follower.read_until(b"live")
        assert [message[0] for message in messages] == [b"gap", b"snapshot", b"live"]


class TestManyFollowers:
    def test_one_that_does_not_read_is_cut_and_the_others_go_on(
        self, start_store: Callable[..., StoreServer], follow: Follow
    ) -> None:
        store = start_store(stall_timeout_seconds=0.5)
        lazy = connect(store.addresses[0], SECONDS)
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(encode_command(b"KV.EVENTS"))
        reading, mirror = follow(of=store), Mirror()
        eventually(lambda: store.store.table.events.followers == 2)
        long_key = b"x" * 500
        number = 0
        while store.store.table.events.followers == 2:
            for _ in range(500):
                number += 1
                put(store.store, b"%s%d" % (long_key, number % 20), b"v")
            while mirror.sequence < number:
                mirror.apply(reading.read())
        assert mirror.in_memory == {b"%s%d" % (long_key, n) for n in range(20)}
        put(store.store, b"after", b"v")
        assert reading.read_until(b"put")[-1][3].endswith(b"after")
        lazy.close()

    def test_no_more_follow_than_may(self, store: StoreServer, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvhearth.store.dram.events.MAX_FOLLOWERS", 2)
        for _ in range(2):
            follow().read_until(b"live")
        assert follow().read() == b"-ERR too many clients follow events"
        with redis.Redis(port=store.addresses[0].port).pubsub() as pubsub:
            pubsub.subscribe("kv.events")
            with pytest.raises(redis.ResponseError, match="too many clients follow"):
                pubsub.get_message(timeout=SECONDS)

    def test_a_follower_that_leaves_leaves_nothing_open(
        self, store: StoreServer, redis_py: redis.Redis, follow: Follow
    ) -> None:
        redis_py.ping()
        before = server_fds()
        followers = [follow() for _ in range(5)]
        for follower in followers:
            follower.read_until(b"live")
        for follower in followers:
            follower.close()
        eventually(lambda: store.store.table.events.followers == 0)
        eventually(lambda: server_fds() == before)

    def test_a_follower_asks_for_nothing_else_but_may_ping_and_quit(self, follow: Follow) -> None:
        follower = follow()
        follower.read_until(b"live")
        follower.sock.sendall(encode_command(b"GET", b"k"))
        assert follower.read().startswith(b"-ERR Can't execute 'get': only (UN)SUBSCRIBE / PING / QUIT are allowed")
        follower.sock.sendall(encode_command(b"SET", b"k", bytes(100_000)))
        assert follower.read().startswith(b"-ERR Can't execute 'set'")
        follower.sock.sendall(encode_command(b"SUBSCRIBE", b"kv.events"))
        assert follower.read() == b"-ERR this connection carries KV.EVENTS"
        follower.sock.sendall(encode_command(b"PING", b"hello"))
        assert follower.read() == [b"pong", b"hello"]
        follower.sock.sendall(encode_command(b"QUIT"))
        assert follower.read() == b"+OK"
        assert not follower.file.read()


class TestChannels:
    @pytest.mark.parametrize("protocol", [2, 3])
    def test_redis_py_hears_of_all_or_of_one_namespace(self, store: StoreServer, protocol: int) -> None:
        port = store.addresses[0].port
        with redis.Redis(port=port, protocol=protocol) as client, client.pubsub() as pubsub:
            pubsub.subscribe("kv.events", "kv.events.ours")
            confirmed = [pubsub.get_message(timeout=SECONDS) for _ in range(2)]
            assert [message["type"] for message in confirmed if message] == ["subscribe"] * 2
            client.set("ours:k", "v")
            client.set("theirs:k", "v")
            client.delete("ours:k")
            heard = [pubsub.get_message(timeout=SECONDS) for _ in range(5)]
            told = [(message["channel"], json.loads(message["data"])) for message in heard if message]
            one = {"event": "put", "sequence": 1, "tier": "d", "namespace": "ours", "key": b"ours:k".hex()}
            assert told[:2] == [(b"kv.events", one), (b"kv.events.ours", one)]
            assert [(channel, what["event"]) for channel, what in told[2:]] == [
                (b"kv.events", "put"),
                (b"kv.events", "evict"),
                (b"kv.events.ours", "evict"),
            ]
            pubsub.ping()
            assert pubsub.get_message(timeout=SECONDS)["type"] == "pong"  # type: ignore[index]
            pubsub.unsubscribe("kv.events")
            assert pubsub.get_message(timeout=SECONDS)["type"] == "unsubscribe"  # type: ignore[index]
            client.set("ours:k", "v")
            assert pubsub.get_message(timeout=SECONDS)["channel"] == b"kv.events.ours"  # type: ignore[index]

    def test_redis_cli_subscribes(self, redis_cli: str, store: StoreServer, redis_py: redis.Redis) -> None:
        command = [redis_cli, "-p", str(store.addresses[0].port), "subscribe", "kv.events"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            head = [process.stdout.readline().strip() for _ in range(3)]
            assert head == ["subscribe", "kv.events", "1"]
            redis_py.set("n:k", "v")
            message = [process.stdout.readline().strip() for _ in range(3)]
            assert message[:2] == ["message", "kv.events"]
            assert json.loads(message[2])["key"] == b"n:k".hex()
            process.kill()

    def test_who_unsubscribes_from_all_may_ask_again(self, store: StoreServer, follow: Follow) -> None:
        client = follow("SINCE")  # an ordinary connection, as this is refused
        client.read()
        client.sock.sendall(encode_command(b"UNSUBSCRIBE"))
        assert client.read() == [b"unsubscribe", None, 0]
        client.sock.sendall(encode_command(b"SUBSCRIBE", b"a", b"b"))
        assert client.read() == [b"subscribe", b"a", 1]
        assert client.read() == [b"subscribe", b"b", 2]
        client.sock.sendall(encode_command(b"GET", b"k"))
        assert client.read().startswith(b"-ERR Can't execute 'get'")
        client.sock.sendall(encode_command(b"UNSUBSCRIBE"))
        assert client.read() == [b"unsubscribe", b"a", 1]
        assert client.read() == [b"unsubscribe", b"b", 0]
        eventually(lambda: store.store.table.events.followers == 0)
        client.sock.sendall(encode_command(b"PING"))
        assert client.read() == b"+PONG"

    def test_there_is_a_bound_on_channels(self, follow: Follow) -> None:
        client = follow("SINCE")
        client.read()
        client.sock.sendall(encode_command(b"SUBSCRIBE", *[b"%d" % number for number in range(65)]))
        assert client.read() == b"-ERR more than 64 channels"
        client.sock.sendall(encode_command(b"GET", b"k"))
        assert client.read() is None  # it follows nothing, so it may do anything

    def test_a_subscriber_that_missed_some_is_told(self, store: StoreServer, follow: Follow) -> None:
        client = follow("SINCE")
        client.read()
        client.sock.sendall(encode_command(b"SUBSCRIBE", b"kv.events"))
        client.read()
        events = store.store.table.events
        eventually(lambda: events.followers == 1)
        with events._lock:
            events._events.extend([(EventKind.EVICT, b"d", b"gone")] * (LOG_EVENTS + 1))  # type: ignore[list-item]
            events._last += LOG_EVENTS + 1
        put(store.store, b"a", b"1")
        assert json.loads(client.read()[2]) == {"event": "gap", "sequence": LOG_EVENTS + 2}


def test_a_follower_ends_with_exactly_the_stores_keys(start_store: Callable[..., StoreServer], follow: Follow) -> None:
    """Under concurrent puts, deletions, evictions and expiry, joined in the midst of it, and with one who is slow."""
    store = start_store(capacity_bytes=MIB, max_items=1024)
    table = store.store.table

    def change(seed: int) -> None:
        choices = random.Random(seed)
        for _ in range(1500):
            key = b"%s:%03d" % (choices.choice([b"one", b"two-longer"]), choices.randrange(200))
            what = choices.random()
            if what < 0.75:
                life = 0.001 if what < 0.05 else None
                put(store.store, key, bytes(PAGE_BYTES * choices.randrange(1, 40)), ttl_seconds=life)
            elif what < 0.998:
                store.store.delete([key])
            else:
                store.store.clear()

    mirrors = [Mirror() for _ in range(3)]
    finished = threading.Event()

    def mirror(index: int) -> None:
        follower = follow(of=store)
        while not finished.is_set() or mirrors[index].sequence < table.events.last:
            mirrors[index].apply(follower.read())

    def change_all() -> None:
        in_threads(*(lambda seed=seed: change(seed) for seed in range(3)))
        eventually(lambda: not table.sweep() and not table._lives.any)  # no one's time ends after this
        put(store.store, b"one:end", b"v")
        finished.set()

    in_threads(change_all, *(lambda index=index: mirror(index) for index in range(3)))
    keys, cursor = table.keys_from(0, 10_000)
    assert not cursor
    assert table.stats().evictions > 0
    for each in mirrors:
        assert each.live
        assert each.in_memory == set(keys)
