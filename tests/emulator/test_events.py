"""What a subscriber hears of an emulated engine's KV cache: vLLM's messages, replays and ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq

from kvhearth.emulator.publisher import KvEventsConfig, parse_kv_events_config
from kvhearth.emulator.vllm_hashes import Adapter, VllmHasher
from kvhearth.engine import OffloadMode
from kvhearth.engine.tokens import encode
from kvhearth.errors import UserError
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

PROMPT = "word " * 100
TOKENS = encode(PROMPT)
EVENTS = KvEventsConfig(
    enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic="kv", buffer_steps=50
)
DEADLINE_MS = 10_000


class Batch(NamedTuple):
    """One message."""

    sequence: int
    rank: int
    events: list[dict[str, Any]]


class Ear:
    """A subscriber; the engine's own process sends to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._sub = context.socket(zmq.SUB)
        self._sub.subscribe(b"kv")
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._sub.connect(endpoint)
        assert self._monitor.poll(DEADLINE_MS)

    def hear(self, timeout_ms: int = DEADLINE_MS) -> Batch | None:
        if not self._sub.poll(timeout_ms):
            return None
        topic, sequence, payload = self._sub.recv_multipart()
        assert topic == b"kv"
        assert len(sequence) == 8
        return _batch(sequence, payload)

    def until(self, enough: Callable[[list[Batch]], bool]) -> list[Batch]:
        """Batches heard until they are enough."""
        heard: list[Batch] = []
        while not enough(heard):
            batch = self.hear()
            assert batch is not None, heard
            heard.append(batch)
        return heard

    def close(self) -> None:
        self._sub.disable_monitor()
        self._monitor.close(linger=0)
        self._sub.close(linger=0)


def _batch(sequence: bytes, payload: bytes) -> Batch:
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert ts > 1e9
    return Batch(int.from_bytes(sequence, "big"), rank, events)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def listen(context, start) -> Iterator[Callable[..., Any]]:
    """Starts an engine, gives it and a subscriber, whose subscription the engine is known to have."""
    with contextlib.ExitStack() as stack:

        def listen(**settings: Any) -> Any:
            engine = start(kv_events=EVENTS, **settings)
            ear = Ear(context, engine.state()["kv_events"]["endpoint"])
            stack.callback(ear.close)
            # A subscription arrives some time after the handshake: tell until it is heard.
            for word in range(1000):
                engine.complete([word] * 16, max_tokens=1)
                if ear.hear(20) is not None:
                    break
            else:
                pytest.fail("nothing was heard")
            while ear.hear(200) is not None:
                pass
            return engine, ear

        yield listen


def replay(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int) -> list[Batch]:
    """Batches from a number on: a question of a number after an empty frame, answers until number -1."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[Batch] = []
        while True:
            assert socket.poll(DEADLINE_MS)
            _, _, sequence, payload = socket.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) == -1:
                return batches
            batches.append(_batch(sequence, payload))


def test_a_subscriber_learns_the_blocks_of_a_prompt_as_vllm_would_tell_them(listen) -> None:
    engine, ear = listen()
    engine.complete(PROMPT, max_tokens=4)
    batch = ear.hear()
    assert batch is not None
    assert batch.rank == 0
    assert batch.events == [
        {
            "type": "BlockStored",
            "block_hashes": VllmHasher().hashes(TOKENS, 16),
            "parent_block_hash": None,
            "token_ids": TOKENS[: len(TOKENS) // 16 * 16],
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * (len(TOKENS) // 16),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]


def test_blocks_of_the_answer_follow_their_parent(listen) -> None:
    engine, ear = listen()
    text = engine.complete(PROMPT, max_tokens=40)["choices"][0]["text"]
    tokens = TOKENS + encode(text)
    hashes = VllmHasher().hashes(tokens, 16)
    *_, last = ear.until(lambda heard: sum(len(batch.events) for batch in heard) == 3)
    event = last.events[0]
    assert event["block_hashes"] == [hashes[-1]]
    assert event["parent_block_hash"] == hashes[-2]
    assert event["token_ids"] == tokens[(len(hashes) - 1) * 16 : len(hashes) * 16]


def test_adapters_and_salts_keep_blocks_apart_and_are_named(listen) -> None:
    adapter = Adapter("poet", "/adapters/poet", 1)
    engine, ear = listen(lora_modules=(("poet", "/adapters/poet"),), prefix_caching_hash_algo="sha256_cbor")
    hasher = VllmHasher("sha256_cbor")
    answer = engine.complete(PROMPT, model="poet", cache_salt="tenant", max_tokens=1)
    assert answer["model"] == "poet"
    batch = ear.hear()
    assert batch is not None
    (event,) = batch.events
    assert event["block_hashes"] == hasher.hashes(TOKENS, 16, "tenant", adapter)
    assert event["block_hashes"] != hasher.hashes(TOKENS, 16, "tenant")
    assert (event["lora_name"], event["lora_id"]) == ("poet", 1)
    assert event["extra_keys"] == [["poet", "tenant"]] + [["poet"]] * (len(TOKENS) // 16 - 1)
    assert [card["id"] for card in engine.http.get("/v1/models").json()["data"]] == ["llama-3.1-8b", "poet"]


def test_what_hbm_needs_for_others_is_removed_and_a_reset_clears_all(listen) -> None:
    engine, ear = listen(num_gpu_blocks_override=21)
    held: set[int] = set()
    for word in ("aaaa ", "bbbb ", "cccc "):
        engine.complete(word * 150, max_tokens=1)
    engine.complete("dddd " * 150, max_tokens=1)
    last = VllmHasher().hashes(encode("dddd " * 150), 16)
    for batch in ear.until(lambda heard: any(e.get("block_hashes") == last for b in heard for e in b.events)):
        for event in batch.events:
            if event["type"] == "BlockStored":
                held |= set(event["block_hashes"])
            else:
                held -= set(event["block_hashes"])
    assert set(last) <= held
    assert len(held) <= 20
    assert engine.http.post("/reset_prefix_cache").json()["success"]
    engine.complete("eeee " * 150, max_tokens=1)
    batch = ear.hear()
    assert batch is not None
    assert batch.events[0] == {"type": "AllBlocksCleared"}


@pytest.mark.parametrize("self_describing", [False, True])
def test_chunks_in_dram_and_in_the_store_are_told_with_their_media(
    listen, tmp_path: Path, self_describing: bool
) -> None:
    store = StoreServer(StoreConfig(16 << 20, listen=None, unix=tmp_path / "s", max_items=10_000)).start()
    try:
        engine, ear = listen(
            offload_mode=OffloadMode.SHARED,
            dram_bytes=1 << 30,
            blocks_per_chunk=2,
            store=f"unix:{tmp_path}/s",
            self_describing_kv_events=self_describing,
        )
        engine.complete(PROMPT, max_tokens=1)
        hashes = VllmHasher().hashes(TOKENS, 16)
        keys = hashes[1::2]

        def told(medium: str) -> Callable[[list[Batch]], bool]:
            return lambda heard: (
                {e["block_hashes"][-1] for b in heard for e in b.events if e.get("medium") == medium} >= set(keys)
            )

        batches = ear.until(lambda heard: told("CPU")(heard) and told("STORAGE")(heard))
    finally:
        store.stop()
    chunks = [event for batch in batches for event in batch.events if event["medium"] == "CPU"]
    assert len(chunks) == len(keys)
    for chunk in chunks:
        at = hashes.index(chunk["block_hashes"][-1])
        if self_describing:
            assert chunk["block_hashes"] == hashes[at - 1 : at + 1]
            assert chunk["token_ids"] == TOKENS[(at - 1) * 16 : (at + 1) * 16]
            assert chunk["parent_block_hash"] == (hashes[at - 2] if at > 1 else None)
            assert chunk["block_size"] == 16
        else:
            assert (chunk["token_ids"], chunk["block_size"], chunk["parent_block_hash"]) == ([], 0, None)


def test_missed_batches_can_be_asked_for_as_long_as_they_are_kept(listen, context) -> None:
    engine, ear = listen()
    for word in range(60):
        engine.complete([1000 + word] * 16, max_tokens=1)
    heard = ear.until(lambda heard: len(heard) == 60)
    endpoint = engine.state()["kv_events"]["replay_endpoint"]
    last = heard[-1].sequence
    assert replay(context, endpoint, last - 9) == heard[-10:]
    assert replay(context, endpoint, 0) == heard[-50:]
    assert replay(context, endpoint, last + 1) == []
    assert [batch.sequence for batch in heard] == list(range(last - 59, last + 1))


def test_every_rank_has_events_metrics_and_requests_of_its_own(context, start, tmp_path: Path) -> None:
    events = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/e", replay_endpoint="tcp://*:0")
    engine = start(kv_events=events, data_parallel_size=3)
    body = {"model": "llama-3.1-8b", "prompt": PROMPT, "max_tokens": 1}
    answer = engine.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "2"})
    assert answer.status_code == 200
    assert engine.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "3"}).status_code == 400
    state = engine.state()
    assert [rank["counters"]["requests_finished"] for rank in state["ranks"]] == [0, 0, 1]
    assert state["counters"]["requests_finished"] == 1
    assert engine.metric("vllm:prompt_tokens_total", engine="2") == len(TOKENS)
    assert engine.metric("vllm:prompt_tokens_total", engine="0") == 0
    (batch,) = replay(context, state["ranks"][2]["kv_events"]["replay_endpoint"], 0)
    assert batch.rank == 2
    assert state["ranks"][2]["kv_events"]["endpoint"] == f"ipc://{tmp_path}/e_dp2"
    engine.complete(PROMPT)  # goes to a rank that is free, whichever
    for no_number in ("two", "+-1"):  # as in vLLM, as if there were none
        response = engine.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": no_number})
        assert response.status_code == 200
    assert engine.state()["counters"]["requests_finished"] == 4


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{", "kv_events_config"),
        ('{"enable_kv_cache_event": true}', "kv_events_config"),
        ('{"publisher": "kafka"}', "kv_events_config"),
        ('{"endpoint": "5557"}', "kv_events_config.endpoint"),
        ('{"endpoint": "tcp://*:65536"}', "kv_events_config.endpoint"),
        ('{"replay_endpoint": "udp://x:1"}', "kv_events_config.replay_endpoint"),
        ('{"buffer_steps": 0}', "kv_events_config.buffer_steps"),
        ('{"hwm": -1}', "kv_events_config.hwm"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(text: str, where: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_kv_events_config(text)
    assert refused.value.where == where
    assert refused.value.remedy


def test_an_event_port_that_is_taken_is_said_so(start, context) -> None:
    with context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        from kvhearth.emulator.faults import Faults
        from kvhearth.emulator.publisher import EventPublisher

        config = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://*:{port}")
        with pytest.raises(UserError, match=str(port)):
            EventPublisher(config, 0, "127.0.0.1", Faults())
