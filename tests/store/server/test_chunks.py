"""Many chunks in one round trip: each with its own answer, plain or packed, and whole or not at all."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from kvhearth.store.client.wire import encode_command
from kvhearth.store.protocol.address import connect
from kvhearth.store.protocol.packed import MAGIC, MAX_PACKED_BYTES, pack_keys
from kvhearth.store.server.server import StoreServer

from ..fakes import SECONDS, eventually

MIB = 2**20


@pytest.fixture
def ask(store: StoreServer) -> Iterator[Any]:
    """Asks `store`; errors come back as they are."""
    connection = redis.Connection(port=store.addresses[0].port, socket_timeout=SECONDS, protocol=2)

    def send(*args: str | bytes | int) -> Any:
        connection.send_command(*args)
        try:
            return connection.read_response()
        except redis.ResponseError as error:
            return str(error)

    yield send
    connection.disconnect()


def keys(count: int) -> list[bytes]:
    return [b"space:%06d" % number for number in range(count)]


def packed(some: list[bytes]) -> bytes:
    made = pack_keys(some)
    assert made is not None
    return made


@pytest.mark.parametrize("is_packed", [False, True])
class TestQuestions:
    def args(self, some: list[bytes], is_packed: bool) -> list[bytes]:
        return [packed(some)] if is_packed else some

    def test_a_match_tells_how_much_of_a_chain_is_there_and_where(self, ask: Any, is_packed: bool) -> None:
        chain = keys(300)
        ask("KV.MPUT", *(word for key in [*chain[:200], chain[201]] for word in (key, b"v")))
        assert ask("KV.MATCH", *self.args(chain, is_packed)) == b"d" * 200
        assert ask("KV.MATCH", *self.args(chain[200:], is_packed)) == b""
        assert ask("KV.MATCH", *self.args(chain[:1], is_packed)) == b"d"

    def test_exists_tells_of_each_key(self, ask: Any, is_packed: bool) -> None:
        some = keys(4)
        ask("MSET", some[0], "v", some[2], "v")
        assert ask("KV.EXISTS", *self.args(some, is_packed)) == b"d-d-"

    def test_mget_has_what_is_there_and_null_for_what_is_not(
        self, ask: Any, store: StoreServer, is_packed: bool
    ) -> None:
        some = keys(4)
        ask("KV.MPUT", some[0], bytes(MIB), some[2], b"", some[3], b"small")
        assert ask("KV.MGET", *self.args(some, is_packed)) == [bytes(MIB), None, b"", b"small"]
        assert not store.store.table._leases

    def test_pins_count_what_is_there(self, ask: Any, store: StoreServer, is_packed: bool) -> None:
        some = keys(4)
        ask("MSET", some[0], "v", some[2], "v")
        assert ask("KV.PIN", "60", *self.args(some, is_packed)) == 2
        assert store.store.table.stats().pinned_bytes == 1024
        assert ask("KV.UNPIN", *self.args(some, is_packed)) == 2
        assert ask("KV.UNPIN", *self.args(some, is_packed)) == 0

    def test_a_prefetch_counts_what_is_in_memory(self, ask: Any, is_packed: bool) -> None:
        some = keys(4)
        ask("MSET", some[0], "v", some[2], "v")
        assert ask("KV.PREFETCH", *self.args(some, is_packed)) == 2


class TestPins:
    def test_a_pinned_value_outlives_a_flood(self, ask: Any) -> None:
        ask("SET", "k", "v")
        assert ask("KV.PIN", "60", "k") == 1
        for number in range(20):
            assert ask("SET", f"flood {number}", bytes(MIB)) == b"OK"
        assert ask("GET", "k") == b"v"
        assert ask("KV.UNPIN", "k") == 1
        for number in range(20):
            ask("SET", f"flood {number}", bytes(MIB))
        assert ask("GET", "k") is None

    @pytest.mark.parametrize("seconds", ["0", "x", "-1", "1.5", "", "9999999999"])
    def test_a_pin_is_for_whole_seconds(self, ask: Any, seconds: str) -> None:
        assert ask("KV.PIN", seconds, "k") == "invalid expire time in 'kv.pin' command"
        assert ask("PING") == b"PONG"

    def test_pins_beyond_half_of_the_store_are_refused_and_none_is_kept(self, ask: Any, store: StoreServer) -> None:
        some = keys(5)
        for key in some:
            ask("SET", key, bytes(MIB))
        assert ask("KV.PIN", "60", *some).startswith("pins take at most half of this store")
        assert store.store.table.stats().pinned_bytes == 0
        assert ask("KV.PIN", "60", *some[:4]) == 4


class TestPuts:
    def test_each_value_has_its_own_answer(self, ask: Any) -> None:
        answers = ask("KV.MPUT", "a", "1", "k" * 600, "2", "b", bytes(5 * MIB), MAGIC + b"x", "3", "c", "4")
        assert [str(answer) if isinstance(answer, Exception) else answer for answer in answers] == [
            b"OK",
            "key of 600 bytes is longer than 512",
            "string exceeds maximum allowed size: 5242880 bytes, this store keeps up to 4194304",
            "a key may not begin like packed keys",
            b"OK",
        ]
        assert ask("MGET", "a", "c", "b") == [b"1", b"4", None]

    def test_an_odd_number_of_arguments_is_refused(self, ask: Any) -> None:
        assert ask("KV.MPUT", "a", "1", "b") == "wrong number of arguments for 'kv.mput' command"
        assert ask("EXISTS", "a") == 0

    def test_puts_and_gets_go_through_a_pipeline(self, redis_py: redis.Redis) -> None:
        with redis_py.pipeline(transaction=False) as pipe:
            for number in range(50):
                pipe.execute_command("KV.MPUT", f"{number}:a", bytes(20_000), f"{number}:b", "v")
                pipe.execute_command("KV.MGET", f"{number}:a", f"{number}:x", f"{number}:b")
                pipe.execute_command("KV.MATCH", packed([b"%d:b" % number]))
            answers = pipe.execute()
        assert answers == [[b"OK", b"OK"], [bytes(20_000), None, b"v"], b"d"] * 50

    @pytest.mark.parametrize("cut_after", ["between values", "within a value", "within a length", "before the CRLF"])
    def test_a_client_that_goes_in_the_midst_leaves_what_was_whole_and_nothing_else(
        self, ask: Any, store: StoreServer, cut_after: str
    ) -> None:
        value = b"v" * 100_000
        whole = encode_command(b"KV.MPUT", b"a", value, b"b", value, b"c", value)
        end_of_b = whole.index(b"$1\r\nc")
        cut = {"between values": 0, "within a value": -50_000, "within a length": 2, "before the CRLF": -2}[cut_after]
        sock = connect(store.addresses[0], SECONDS)
        sock.sendall(whole[: end_of_b + cut])
        sock.close()
        left = [b"a"] if cut < 0 else [b"a", b"b"]
        eventually(lambda: store.registry and len(store.store.table) == len(left))
        eventually(lambda: not store.store.table.stats().uploading_bytes)
        assert ask("MGET", "a", "b", "c") == [value, value if cut >= 0 else None, None]
        assert store.store.table.stats().used_bytes == len(left) * 100_352

    def test_a_client_that_goes_while_it_is_sent_values_leaves_no_lease(self, ask: Any, store: StoreServer) -> None:
        some = keys(8)
        for key in some:
            ask("SET", key, bytes(MIB // 2))
        sock = connect(store.addresses[0], SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(encode_command(b"KV.MGET", *some) * 3)
        eventually(lambda: store.store.table._leases)
        sock.close()
        eventually(lambda: not store.store.table._leases)
        ask("FLUSHDB")
        eventually(lambda: not store.store.table.stats().used_bytes)


class TestWhatIsRefused:
    @pytest.mark.parametrize("command", ["KV.MATCH", "KV.EXISTS", "KV.MGET", "KV.UNPIN", "KV.PREFETCH"])
    def test_packed_keys_that_are_none_are_named_and_the_connection_goes_on(self, ask: Any, command: str) -> None:
        assert ask(command, MAGIC + b"\x04\x00abcde").startswith("packed keys of 4 bytes in 5 bytes")
        assert ask(command, MAGIC).startswith("packed keys of 4 bytes")
        assert ask(command, b"x" * 20_000) == "key of 20000 bytes is too long"
        assert ask("PING") == b"PONG"

    def test_more_than_a_mebibyte_of_packed_keys_ends_the_connection(self, ask: Any) -> None:
        assert ask("KV.MATCH", MAGIC + b"\x01\x00" + bytes(MAX_PACKED_BYTES)) == "Protocol error: invalid bulk length"
        with pytest.raises(redis.ConnectionError):
            ask("PING")


def test_stats_are_every_figure_as_json(ask: Any) -> None:
    ask("SET", "space:k", "v")
    ask("GET", "space:k")
    told = json.loads(ask("KV.STATS"))
    assert told["dram"]["items"] == 1
    assert told["hits"] == 1
    assert told["events"]["sequence"] == 1
    assert told["namespaces"]["space"] == {"value_bytes": 1, "values": 1}
    assert told["tiers"] == {}
    assert ask("KV.STATS", "x") == "wrong number of arguments for 'kv.stats' command"
