"""What a router that comes late is told an engine holds is exactly what it holds, and nobody else may read it."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx
from vllm.v1.request import Request

from kvhearth.connector.snapshot import TOKEN_VARIABLE, SnapshotServer
from kvhearth.errors import UserError
from kvhearth.store.protocol.address import parse_address
from vllm import SamplingParams

from .rig import BLOCK, WINDOW, Rig, _hasher, tokens

LISTEN = {"snapshot_listen": "127.0.0.1:0"}


class Block(NamedTuple):
    """What a block is, told from its request alone."""

    parent: Any
    token_ids: tuple[int, ...]
    extra: tuple[Any, ...] | None


class Known:
    """Every block that the requests of a test can have, by hash. Each request is run to its end."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.blocks: dict[Any, Block] = {}

    def run(self, name: str, prompt: list[int], output: int = 2, salt: str | None = None) -> None:
        self.rig.run(name, prompt, output, salt=salt)
        self.learn(prompt + [7] * output, salt)

    def learn(self, token_ids: list[int], salt: str | None) -> None:
        whole = Request("x", token_ids, SamplingParams(max_tokens=1), None, block_hasher=_hasher(), cache_salt=salt)
        parent = None
        for at, block_hash in enumerate(whole.block_hashes):
            name = maybe_convert_block_hash(block_hash)
            extra = (salt,) if salt and not at else None
            self.blocks[name] = Block(parent, tuple(token_ids[at * BLOCK : (at + 1) * BLOCK]), extra)
            parent = name


def get(port: int, path: str = "/snapshot", **headers: str) -> tuple[int, bytes]:
    """One request over HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def snapshot_of(rig: Rig) -> KVEventBatch:
    """As a router would get it."""
    status, body = get(rig.connector._snapshot.port)
    assert status == 200
    return msgspec.msgpack.decode(body, type=KVEventBatch)


def shown(rig: Rig, known: Known, medium: str) -> set[tuple[Any, int]]:
    """(hash, KV group) of each block that the snapshot shows in a medium; each must be what its request says it is."""
    found: set[tuple[Any, int]] = set()
    for event in snapshot_of(rig).events:
        assert isinstance(event, BlockStored)
        assert event.block_size == BLOCK
        assert event.medium in (MEDIUM_GPU, MEDIUM_CPU)
        if event.medium != medium:
            continue
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        parent = event.parent_block_hash
        for at, block_hash in enumerate(event.block_hashes):
            block = known.blocks[block_hash]
            assert parent == block.parent
            assert tuple(event.token_ids[at * BLOCK : (at + 1) * BLOCK]) == block.token_ids
            assert (event.extra_keys[at] if event.extra_keys else None) == block.extra
            if medium == MEDIUM_GPU:  # a block may begin several chunks
                assert (block_hash, event.group_idx) not in found, "shown twice"
            found.add((block_hash, event.group_idx))
            parent = block_hash
    return found


def named(key: bytes) -> tuple[Any, int]:
    return maybe_convert_block_hash(get_offload_block_hash(key)), get_offload_group_idx(key)


def in_hbm(rig: Rig) -> set[tuple[Any, int]]:
    """What HBM's prefix cache holds."""
    cache = rig.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    return {named(key) for key in cache}


def chunks_in_dram(rig: Rig) -> set[tuple[Any, int]]:
    """The last block of every chunk that DRAM holds."""
    return {named(key) for key, chunk in rig.side.manager.primary_tier._policy.chunks.items() if chunk.is_ready}


def blocks_in_dram(rig: Rig, known: Known, blocks_per_chunk: int) -> set[tuple[Any, int]]:
    """All blocks of those chunks."""
    found = set()
    for name, group in chunks_in_dram(rig):
        for _ in range(blocks_per_chunk):
            assert name is not None
            found.add((name, group))
            name = known.blocks[name].parent
    return found


def check(rig: Rig, known: Known, blocks_per_chunk: int = 1) -> None:
    assert shown(rig, known, MEDIUM_GPU) == in_hbm(rig)
    assert shown(rig, known, MEDIUM_CPU) == blocks_in_dram(rig, known, blocks_per_chunk)


@pytest.fixture
def start() -> Iterator[Callable[..., Known]]:
    """Engines that serve snapshots."""
    rigs: list[Rig] = []

    def begin(**settings: Any) -> Known:
        rigs.append(Rig(**{"extra": LISTEN, **settings}))
        return Known(rigs[-1])

    yield begin
    for rig in rigs:
        rig.close()


def test_an_engine_that_has_seen_nothing_shows_nothing(start: Callable[..., Known]) -> None:
    batch = snapshot_of(start().rig)

    assert batch.events == []
    assert batch.data_parallel_rank == 0


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize("hybrid", [False, True])
def test_what_is_shown_is_what_is_held(start: Callable[..., Known], blocks_per_chunk: int, hybrid: bool) -> None:
    """Requests that share beginnings, more than HBM and DRAM hold, and generated tokens too."""
    engine = start(blocks=48, dram_chunks=40, blocks_per_chunk=blocks_per_chunk, hybrid=hybrid)
    rng = np.random.default_rng(11)
    common = tokens(1, 6 * BLOCK)
    for number in range(10):
        prompt = common[: int(rng.integers(0, 7)) * BLOCK] + tokens(100 + number, int(rng.integers(5, 9 * BLOCK)))
        engine.run(f"r{number}", prompt, int(rng.integers(1, 2 * BLOCK)))
        check(engine.rig, engine, blocks_per_chunk)

    assert in_hbm(engine.rig)
    assert chunks_in_dram(engine.rig)


def test_what_only_dram_has_is_shown_there_alone(start: Callable[..., Known]) -> None:
    engine = start()
    engine.run("a", tokens(1, 5 * BLOCK + 3))
    engine.rig.forget_hbm()
    assert shown(engine.rig, engine, MEDIUM_GPU) == set()
    assert len(shown(engine.rig, engine, MEDIUM_CPU)) == 5
    engine.rig.forget_dram()

    assert snapshot_of(engine.rig).events == []


def test_requests_of_tenants_with_salts_are_shown_with_them(start: Callable[..., Known]) -> None:
    engine = start(blocks_per_chunk=2)
    prompt = tokens(1, 6 * BLOCK + 1)
    engine.run("plain", prompt)
    engine.run("one", prompt, salt="tenant-1")
    engine.run("two", prompt, salt="tenant-2")
    check(engine.rig, engine, 2)
    extras = {
        event.extra_keys[0] if event.extra_keys else None
        for event in snapshot_of(engine.rig).events
        if event.parent_block_hash is None
    }

    assert extras == {None, ("tenant-1",), ("tenant-2",)}


def test_a_window_is_shown_as_such(start: Callable[..., Known]) -> None:
    engine = start(hybrid=True)
    engine.run("a", tokens(1, 8 * BLOCK))
    kinds = {(event.group_idx, event.kv_cache_spec_sliding_window) for event in snapshot_of(engine.rig).events}

    assert kinds == {(0, None), (1, WINDOW)}


def test_preempted_and_aborted_requests_are_shown_as_far_as_they_are_held(start: Callable[..., Known]) -> None:
    engine = start(blocks=24)
    rig = engine.rig
    for number in range(4):
        rig.submit(f"r{number}", tokens(number, 5 * BLOCK), 3 * BLOCK)
        engine.learn(tokens(number, 5 * BLOCK) + [7] * 3 * BLOCK, None)
    for _ in range(12):
        rig.step()
    rig.abort("r1")
    rig.finish()

    assert rig.preemptions
    check(rig, engine)


def test_the_table_stays_bounded_and_right_however_many_requests_come(start: Callable[..., Known]) -> None:
    engine = start(blocks=24, dram_chunks=16)
    holdings = engine.rig.side.holdings
    holdings._most = 2 * (24 + 16)
    for number in range(60):
        engine.run(f"r{number}", tokens(number, int(4 * BLOCK + number)))
        assert len(holdings._where) <= holdings._most + 2 * 9
    check(engine.rig, engine)


def test_the_bound_is_a_small_multiple_of_what_the_engine_can_hold(start: Callable[..., Known]) -> None:
    engine = start(blocks=40, dram_chunks=64, blocks_per_chunk=2, hybrid=True)
    holdings = engine.rig.side.holdings

    assert holdings._most >= 2 * (40 + 2 * 64)
    assert holdings._most <= 4 * (40 + 2 * 64) + 4096


def test_snapshots_may_be_taken_while_the_engine_works(start: Callable[..., Known]) -> None:
    engine = start()
    port, wrong, done = engine.rig.connector._snapshot.port, [], threading.Event()

    def look() -> None:
        while not done.is_set():
            status, body = get(port)
            if status not in (200, 503):
                wrong.append(status)
            if status == 200:
                msgspec.msgpack.decode(body, type=KVEventBatch)

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for number in range(8):
            engine.run(f"r{number}", tokens(number, 8 * BLOCK), BLOCK)
    finally:
        done.set()
        for looker in lookers:
            looker.join(30)

    assert wrong == []
    check(engine.rig, engine)


# ---- who may ask, and where


class Nothing:
    """Holdings of an engine that has none."""

    def snapshot(self) -> bytes:
        return b"all of it"


@pytest.fixture
def serve() -> Iterator[Callable[..., SnapshotServer]]:
    """Snapshot servers."""
    servers: list[SnapshotServer] = []

    def start(listen: str = "127.0.0.1:0", holdings: Any = None) -> SnapshotServer:
        servers.append(SnapshotServer(parse_address(listen), holdings or Nothing()))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_beyond_loopback_it_does_not_start_without_a_token(
    serve: Callable[..., SnapshotServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(UserError) as refused:
        serve("0.0.0.0:0")

    assert "0.0.0.0:0 is reachable from other machines" in refused.value.what
    assert refused.value.where == "kv_connector_extra_config.snapshot_listen"
    assert TOKEN_VARIABLE in refused.value.remedy


def test_with_a_token_nobody_reads_without_it(
    serve: Callable[..., SnapshotServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "open-sesame")
    port = serve("0.0.0.0:0").port

    assert get(port)[0] == 401
    for wrong in ("Bearer open", "Bearer ", "open-sesame2", "Bearer open-sesame2", "Basic open-sesame", "Bearer \xe9"):
        status, body = get(port, Authorization=wrong)
        assert (status, b"all of it" in body) == (401, False)
    assert get(port, "/anything")[0] == 401
    assert get(port, Authorization="Bearer open-sesame") == (200, b"all of it")
    assert "open-sesame" not in caplog.text


def test_on_loopback_no_token_is_needed_and_any_other_path_is_not_found(
    serve: Callable[..., SnapshotServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    port = serve().port

    assert get(port) == (200, b"all of it")
    assert get(port, "/")[0] == 404
    assert get(port, "/snapshot/../x")[0] == 404


def test_more_askers_at_once_than_it_answers_are_told_to_come_again(serve: Callable[..., SnapshotServer]) -> None:
    begun, go = threading.Semaphore(0), threading.Event()

    class Slow:
        def snapshot(self) -> bytes:
            begun.release()
            go.wait(30)
            return b"x"

    port = serve(holdings=Slow()).port
    answers: list[int] = []
    askers = [threading.Thread(target=lambda: answers.append(get(port)[0])) for _ in range(2)]
    for asker in askers:
        asker.start()
    for _ in askers:
        assert begun.acquire(timeout=30)
    assert get(port)[0] == 503
    go.set()
    for asker in askers:
        asker.join(30)

    assert answers == [200, 200]
    assert get(port)[0] == 200


def test_a_port_that_is_taken_is_named(serve: Callable[..., SnapshotServer]) -> None:
    port = serve().port
    with pytest.raises(UserError, match=rf"snapshot_listen: cannot listen on 127.0.0.1:{port}: .*; choose another"):
        serve(f"127.0.0.1:{port}")


def test_it_listens_on_ipv6_too(serve: Callable[..., SnapshotServer]) -> None:
    port = serve("[::1]:0").port
    connection = http.client.HTTPConnection("::1", port, timeout=30)
    connection.request("GET", "/snapshot")

    assert connection.getresponse().read() == b"all of it"
    connection.close()


def test_a_data_parallel_rank_serves_at_its_own_port_and_says_which_it_is(
    serve: Callable[..., SnapshotServer],
) -> None:
    free = serve()
    base = free.port
    free.close()

    def second_rank(config: Any) -> None:
        config.parallel_config.data_parallel_index = 1

    with Rig(extra={"snapshot_listen": f"127.0.0.1:{base}"}, tweak=second_rank) as rig:
        assert rig.connector._snapshot.port == base + 1
        assert snapshot_of(rig).data_parallel_rank == 1


def test_an_engine_that_ends_stops_serving() -> None:
    rig = Rig(extra=LISTEN)
    port = rig.connector._snapshot.port
    rig.close()

    with pytest.raises(OSError):
        get(port)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvhearth-snapshot"]
