"""What stands behind policy kv-aware in a running router: ids asked for, the store's feed, reasons for misses."""

from __future__ import annotations

import json

from kvhearth.router.config import EventSource, KvSettings
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
