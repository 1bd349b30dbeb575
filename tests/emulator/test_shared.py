"""Engines in mode shared trade KV through a real store; without it they compute, until it is back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhearth.emulator.store_io import StoreIo, store_key
from kvhearth.engine import OffloadMode
from kvhearth.engine.tokens import block_hashes, encode
from kvhearth.store.client.client import Put, StoreClient
from kvhearth.store.protocol.header import Header
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

PROMPT = "word " * 500
LENGTH = len(encode(PROMPT))
CHUNKS = LENGTH // 64
SHARED = {
    "offload_mode": OffloadMode.SHARED,
    "dram_bytes": 1 << 30,
    "blocks_per_chunk": 4,
    "store_deadline_seconds": 0.5,
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "store"
    server = serve_store(path)
    yield path
    server.stop()


def serve_store(path: Path) -> StoreServer:
    return StoreServer(StoreConfig(16 << 20, listen=None, unix=path, max_items=10_000)).start()


def test_the_second_engine_takes_from_the_store_what_the_first_computed(start, eventually, store) -> None:
    first, second = (start(store=f"unix:{store}", engine_id=name, **SHARED) for name in ("a", "b"))
    text = first.complete(PROMPT)["choices"][0]["text"]
    eventually(lambda: first.metric("kvhearth_emulator_transfer_bytes_total", kind="put") > 0)
    eventually(lambda: first.state()["counters"]["put_bytes"] == first.state()["counters"]["save_bytes"])
    answer = second.complete(PROMPT)
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == CHUNKS * 64
    counters = second.state()["counters"]
    assert counters["prompt_tokens_store"] == CHUNKS * 64
    assert counters["prompt_tokens_compute"] == LENGTH - CHUNKS * 64
    assert counters["reprefills_avoided"] == 1
    assert second.metric("vllm:external_prefix_cache_hits_total") == CHUNKS * 64
    assert second.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == CHUNKS * 64
    assert second.metric("vllm:prompt_tokens_cached_by_source_total", source="external_unspecified") == CHUNKS * 64


def test_real_bytes_move_scaled_down_by_the_stated_factor(start, eventually, store) -> None:
    engine = start(store=f"unix:{store}", store_bytes_scale=4096, **SHARED)
    engine.complete(PROMPT)
    chunk_bytes = 64 * 131_072
    eventually(lambda: engine.state()["counters"]["put_bytes"] == CHUNKS * chunk_bytes)
    state = engine.state()["store"]
    assert state["bytes_scale"] == 4096
    assert state["put_bytes"] == CHUNKS * chunk_bytes // 4096
    assert engine.metric("kvhearth_emulator_store_payload_bytes_total", kind="put") == state["put_bytes"]
    client = StoreClient(f"unix:{store}")
    namespace = engine.emulator.shape.namespace
    keys = [store_key(namespace, value) for value in block_hashes(encode(PROMPT), 16)[3::4]]
    assert client.match(keys) == CHUNKS
    assert client.get_into(keys[0], bytearray(chunk_bytes)).nbytes == chunk_bytes // 4096
    client.close()


def test_a_killed_store_costs_hits_not_answers_and_heals(start, eventually, tmp_path: Path) -> None:
    path = tmp_path / "store"
    server = serve_store(path)
    first, second = (start(store=f"unix:{path}", engine_id=name, **SHARED) for name in ("a", "b"))
    first.complete(PROMPT)
    eventually(lambda: first.state()["counters"]["put_bytes"] == first.state()["counters"]["save_bytes"])
    server.stop()
    assert second.complete(PROMPT)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.metric("kvhearth_emulator_store_up") == 0
    assert second.metric("kvhearth_emulator_store_errors_total") > 0
    server = serve_store(path)
    try:
        fresh = iter(range(1000))

        def computes_and_puts() -> bool:
            first.complete(f"{next(fresh)} " + PROMPT)
            return bool(first.metric("kvhearth_emulator_store_up"))

        eventually(computes_and_puts)
        counters = first.state()["counters"]
        other = "and again " + PROMPT
        first.complete(other)
        eventually(lambda: first.state()["counters"]["put_bytes"] >= counters["put_bytes"] + CHUNKS * 64 * 131_072)

        def hits() -> bool:
            return bool(second.complete(other)["usage"]["prompt_tokens_details"]["cached_tokens"])

        eventually(hits)
    finally:
        server.stop()


def test_wrong_bytes_in_the_store_are_seen_and_never_used(start, store) -> None:
    engine = start(store=f"unix:{store}", **SHARED)
    shape = engine.emulator.shape
    keys = [store_key(shape.namespace, value) for value in block_hashes(encode(PROMPT), 16)[3::4]]
    client = StoreClient(f"unix:{store}")
    row = b"\0" * shape.payload_bytes
    assert all(result.stored for result in client.put_many([Put(key, Header(len(row)), row) for key in keys]))
    client.close()
    answer = engine.complete(PROMPT)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert engine.metric("kvhearth_emulator_wrong_bytes_total") > 0
    assert engine.metric("kvhearth_emulator_failed_loads_total") > 0


def test_native_restores_from_dram_what_hbm_lost(start) -> None:
    engine = start(num_gpu_blocks_override=101, offload_mode=OffloadMode.NATIVE, dram_bytes=4 << 30)
    engine.complete(PROMPT)
    for other in ("aaaa ", "bbbb ", "cccc "):
        engine.complete(other * 1200)
    engine.complete(PROMPT)
    counters = engine.state()["counters"]
    assert counters["prompt_tokens_dram"] >= LENGTH - 16
    assert engine.metric("vllm:kv_offload_load_bytes_total") == counters["load_bytes"] > 0
    assert engine.metric("vllm:kv_offload_load_time_total") > 0
    assert engine.metric("vllm:kv_offload_total_bytes_total", transfer_type="GPU_to_CPU") == counters["save_bytes"]


def test_puts_beyond_the_queue_are_dropped_from_the_end(store, eventually) -> None:
    io = StoreIo(
        f"unix:{store}",
        None,
        namespace="test:",
        payload_bytes=64,
        deadline_seconds=5.0,
        now_ns=lambda: 0,
    )
    try:
        reply = io.put(range(10_000))
        assert io.counts()["puts_dropped"] == 10_000 - 8192
        eventually(lambda: reply.at_ns is not None)
        assert reply.count == 8192
        asked = io.match(range(8192, 10_000))
        eventually(lambda: asked.at_ns is not None)
        assert asked.count == 0
    finally:
        io.close()
