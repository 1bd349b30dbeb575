"""Following real store nodes: which of an engine's chunks the pool's store holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from kvhearth.router.feeds.store import Holdings, StoreFeed, _message, chunk_hash
from kvhearth.routing.index import KvIndex, Medium, StoredBlocks
from kvhearth.store.client.async_wire import open_wire
from kvhearth.store.client.outcomes import Miss
from kvhearth.store.protocol.address import Address
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

from .conftest import BLOCK, eventually, keys_of

MIB = 1 << 20
StartStore = Callable[..., StoreServer]


@pytest.fixture
def start_store() -> Iterator[StartStore]:
    servers: list[StoreServer] = []

    def start(**settings: Any) -> StoreServer:
        servers.append(StoreServer(StoreConfig(**{"capacity_bytes": 8 * MIB, "listen": "127.0.0.1:0", **settings})))
        return servers[-1].start()

    yield start
    for server in servers:
        server.stop()


def name_of(number: int, kv_group: int = 0) -> bytes:
    """A store key whose chunk ends in the block with this hash."""
    return b"%032x:" % 7 + bytes(24) + number.to_bytes(8, "big") + kv_group.to_bytes(4, "big")


def described(index: KvIndex, blocks: int = 3) -> None:
    """An engine has told what the hashes 1, 2, … mean, and holds none of them any more."""
    index.join("e", "pool")
    numbers = list(range(1, blocks + 1))
    index.stored("e", Medium.HBM, StoredBlocks(numbers, None, list(range(BLOCK * blocks)), BLOCK))
    index.removed("e", Medium.HBM, numbers)


def in_store(index: KvIndex) -> int:
    return index.match(keys_of(3), ["e"])[0].store


def put(server: StoreServer, *numbers: int) -> None:
    with redis.Redis(port=server.addresses[0].port) as client:
        client.mset({name_of(number): b"x" for number in numbers})


async def test_what_is_held_put_and_evicted_is_told(start_store: StartStore, index: KvIndex) -> None:
    server = start_store()
    described(index)
    put(server, 1)
    feed = StoreFeed(server.address, Holdings("pool", index))
    feed.start()
    try:
        await eventually(lambda: in_store(index) == 1)
        put(server, 2, 3)
        await eventually(lambda: in_store(index) == 3)
        with redis.Redis(port=server.addresses[0].port) as client:
            client.delete(name_of(2))
        await eventually(lambda: in_store(index) == 1)
        with redis.Redis(port=server.addresses[0].port) as client:
            client.flushdb()
        await eventually(lambda: in_store(index) == 0)
        assert feed.state.connected
    finally:
        await feed.stop()


async def test_a_store_that_is_away_and_comes_back_empty_is_believed_empty(
    start_store: StartStore, index: KvIndex
) -> None:
    server = start_store()
    described(index)
    put(server, 1, 2)
    feed = StoreFeed(server.address, Holdings("pool", index))
    feed.start()
    try:
        await eventually(lambda: in_store(index) == 2)
        server.stop()
        await eventually(lambda: not feed.state.connected)
        again = start_store(listen=server.address)
        await eventually(lambda: feed.state.connected)
        await eventually(lambda: in_store(index) == 0)
        put(again, 1)
        await eventually(lambda: in_store(index) == 1)
    finally:
        await feed.stop()


async def test_what_happened_in_an_absence_that_the_store_has_forgotten_is_told_anew(
    start_store: StartStore, index: KvIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhearth.store.dram.events.LOG_EVENTS", 4)
    server = start_store()
    described(index)
    put(server, 1, 2)
    feed = StoreFeed(server.address, Holdings("pool", index))
    feed.start()
    await eventually(lambda: in_store(index) == 2)
    await eventually(lambda: feed.state.events["live"] == 1)
    await feed.stop()
    with redis.Redis(port=server.addresses[0].port) as client:
        client.delete(name_of(2))
        client.mset({b"%d" % number: b"x" for number in range(20)})
    feed.start()
    try:
        await eventually(lambda: in_store(index) == 1)
    finally:
        await feed.stop()


async def test_a_chunk_on_two_nodes_is_there_until_both_have_let_go(start_store: StartStore, index: KvIndex) -> None:
    nodes = [start_store(), start_store()]
    described(index)
    holdings = Holdings("pool", index)
    feeds = [StoreFeed(node.address, holdings) for node in nodes]
    for node, feed in zip(nodes, feeds, strict=True):
        put(node, 1)
        feed.start()
    try:
        await eventually(lambda: all(feed.state.events["live"] for feed in feeds))
        for node, left in ((nodes[0], 1), (nodes[1], 0)):
            with redis.Redis(port=node.addresses[0].port) as client:
                client.delete(name_of(1))
            await eventually(lambda node=node: feeds[nodes.index(node)].state.events["evict"] == 1)
            assert in_store(index) == left
    finally:
        for feed in feeds:
            await feed.stop()


def test_chunks_in_the_store_are_as_long_as_those_in_dram(index: KvIndex) -> None:
    described(index, blocks=4)
    holdings = Holdings("pool", index)
    holdings.put("a", b"d", [2])
    assert index.match(keys_of(4), ["e"])[0].store == 0  # nobody has said yet how long a chunk is
    index.stored("e", Medium.DRAM, StoredBlocks([4], chunk_blocks=2))
    assert index.match(keys_of(4), ["e"])[0] == (0, 2, 2)


async def test_a_store_that_asks_for_a_password(start_store: StartStore, index: KvIndex) -> None:
    server = start_store(password="open sesame")
    described(index)
    wrong = StoreFeed(server.address, Holdings("pool", index), password="guess")
    right = StoreFeed(server.address, Holdings("pool", index), password="open sesame")
    wrong.start()
    right.start()
    try:
        await eventually(lambda: right.state.connected)
        assert not wrong.state.connected
    finally:
        await wrong.stop()
        await right.stop()


def test_a_chunk_that_moves_between_tiers_stays_known(index: KvIndex) -> None:
    described(index)
    holdings = Holdings("pool", index)
    holdings.put("a", b"d", [1])
    holdings.put("a", b"k", [1])
    holdings.evict("a", b"d", [1])
    assert in_store(index) == 1
    holdings.clear("a", b"k")
    assert in_store(index) == 0
    assert len(holdings) == 0


def test_no_more_chunks_are_remembered_than_allowed(index: KvIndex) -> None:
    holdings = Holdings("pool", index, most=2)
    holdings.put("a", b"d", [1, 2, 3])
    assert len(holdings) == 2
    holdings.evict("a", b"d", [1, 2, 3])
    assert len(holdings) == 0


def test_keys_that_name_no_chunk_that_counts() -> None:
    assert chunk_hash(name_of(5)) == 5
    assert chunk_hash(name_of(5, kv_group=1)) is None
    assert chunk_hash(b"short") is None
    assert chunk_hash(b"x" * 80) is None


@pytest.mark.parametrize(
    "message",
    [
        [b"put"],
        [b"put", b"no number"],
        [b"put", 1],
        [b"evict", 1, b"d"],
        [b"evict", 1, b"two", b""],
        [b"snapshot", 1, 2, b""],
        [7, 1],
    ],
)
def test_what_is_no_event_is_a_miss_and_no_fault(index: KvIndex, message: list[bytes | int]) -> None:
    feed = StoreFeed("127.0.0.1:1", Holdings("pool", index))
    with pytest.raises(Miss, match=r"event|sequence"):
        feed._take(message)


def test_events_of_an_unknown_kind_are_counted_and_not_remembered_by_name(index: KvIndex) -> None:
    feed = StoreFeed("127.0.0.1:1", Holdings("pool", index))
    for number in range(50):
        feed._take([b"new \xff %d" % number, number])
    assert feed.state.ignored["unknown_event"] == 50
    assert not feed.state.events


@pytest.mark.parametrize(
    "wire", [b"*00800000000\r\n", b"*2\r\n$3\r\nput\r\n:x\r\n", b"*2\r\n:\r\n", b"*2\r\n$9999999999\r\n"]
)
async def test_bytes_that_are_no_event_are_a_miss_and_no_fault(wire: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connection = await open_wire(Address("127.0.0.1", server.sockets[0].getsockname()[1]), None)
        with pytest.raises(Miss):
            await _message(connection)
        connection.close()
