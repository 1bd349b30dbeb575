"""What stands behind policy kv-aware in a running router: ids asked for, the store's feed, reasons for misses."""

from __future__ import annotations

import json

import pytest

from kvhearth.router.config import EventSource, KvSettings
from kvhearth.router.kv import BlockSizes
from kvhearth.routing.index import Medium, StoredBlocks
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

NOBODY = EventSource("tcp://127.0.0.1:1")


def kv(**settings) -> KvSettings:
    return KvSettings(events={"e0": NOBODY}, **settings)


def hit_of(wire) -> str:
    return dict(wire.response()[1])["x-kvhearth-hit"]


def test_the_stores_feed_is_followed_with_its_password(lab):
    store = StoreServer(StoreConfig(capacity_bytes=1 << 23, listen="127.0.0.1:0", password="open sesame")).start()
    try:
        settings = kv(store=store.address, store_password="open sesame")
        router = lab.router(lab.engine(), policy="kv-aware", kv=settings)
        lab.until(lambda: router.metric("kvhearth_router_store_feed_connected") == 1)
    finally:
        store.stop()


def test_ids_that_a_client_sends_are_keys_at_once(lab):
    engine = lab.engine()
    router = lab.router(engine, policy="kv-aware", kv=kv(block_tokens=4))
    wire = router.wire()
    for expected in ("tokens=0", "tokens=8"):  # what was sent counts as held until events say otherwise
        wire.post(json.dumps({"model": "m", "prompt": list(range(10))}).encode())
        assert hit_of(wire).startswith(expected)
    assert router.metric("kvhearth_router_tokenized_total", by="given") == 2
    assert router.metric("kvhearth_router_misses_total", reason="no_events") == 1


def test_an_engine_that_tells_no_ids_leaves_the_request_to_its_text(lab):
    engine = lab.engine()  # answers /tokenize as it answers everything
    router = lab.router(engine, policy="kv-aware", kv=kv(block_tokens=4))
    wire = router.wire()
    wire.post(json.dumps({"model": "m", "prompt": "x" * 1000}).encode())
    assert hit_of(wire).startswith("pieces=")
    assert router.metric("kvhearth_router_misses_total", reason="refused") == 1


def test_a_client_that_leaves_while_ids_are_made_leaves_nothing_behind(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, policy="kv-aware", kv=kv(block_tokens=4))
    wire = router.wire()
    wire.post(json.dumps({"model": "m", "prompt": "x" * 100}).encode())
    lab.until(lambda: router.metric("kvhearth_router_exchanges") == 1)
    wire.close()
    lab.until(lambda: router.metric("kvhearth_router_exchanges") == 0)
    assert router.metric("kvhearth_router_requests_in_flight") == 0
    engine.let_go(4)


def test_a_fault_while_ids_are_waited_for_leaves_no_client_waiting(lab, monkeypatch, caplog):
    router = lab.router(lab.engine(), policy="kv-aware", kv=kv(block_tokens=4))

    def fail(*asked):
        raise ZeroDivisionError

    monkeypatch.setattr(router.inner.kv, "keys", fail)
    wire = router.wire()
    wire.post(json.dumps({"model": "m", "prompt": "x" * 100}).encode())
    status, error = wire.error()
    assert (status, error["code"]) == (500, "internal")
    assert "ZeroDivisionError" in caplog.text
    assert router.metric("kvhearth_router_exchanges") == 0


@pytest.mark.parametrize("wrong", [{"block_tokens": -4}, {"block_tokens": 8}, {"token_ids": ()}])
def test_an_event_that_contradicts_itself_says_nothing_of_the_size_of_blocks(wrong):
    index = BlockSizes(max_bytes=1 << 20, now=lambda: 0.0)
    right = StoredBlocks([1], None, [1, 2, 3, 4], 4)
    index.stored("e0", Medium.HBM, right)
    index.stored("e0", Medium.HBM, right._replace(**wrong))
    assert index.block_tokens == {"e0": 4}


def test_an_engine_whose_answer_is_nested_without_end_tells_no_ids(lab):
    engine = lab.engine()
    engine.behave = lab.reply(body=b"[" * 5000)
    router = lab.router(engine, policy="kv-aware", kv=kv(block_tokens=4))
    wire = router.wire()
    wire.post(json.dumps({"model": "m", "prompt": "x" * 1000}).encode())
    assert hit_of(wire).startswith("pieces=")
    assert router.metric("kvhearth_router_misses_total", reason="refused") == 1
