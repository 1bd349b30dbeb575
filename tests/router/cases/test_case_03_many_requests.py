"""Thousands of requests later the router keeps of them what it counts, and nothing else."""

from __future__ import annotations

import json

from kvhearth.router.config import EventSource, KvSettings

REQUESTS = 3000
PIPELINED = 50
NOBODY = EventSource("tcp://127.0.0.1:1")
TABLES = ("requests_in_flight", "in_flight_tokens", "prefill_tokens", "exchanges", "buffered_bytes")


def test_3000_requests_later_every_table_is_empty_and_every_request_is_counted(lab):
    engines = [lab.engine(), lab.engine()]
    for engine in engines:
        # vLLM's own last words of a stream, so that its usage is counted too
        engine.behave = lab.events([b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n', b"data: [DONE]\n\n"])
    settings = KvSettings(events={"e0": NOBODY}, block_tokens=16)
    router = lab.router(*engines, policy="kv-aware", kv=settings, decisions_kept=64)
    wire = router.wire()
    for first in range(0, REQUESTS, PIPELINED):
        for number in range(first, first + PIPELINED):
            wire.post(json.dumps({"model": "m", "prompt": [number] * 33, "stream": True}).encode())
        for _ in range(PIPELINED):
            status, _, body = wire.response()
            assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")
    lab.until(lambda: not router.inner.exchanges, "the last exchange is over")
    for table in TABLES:
        assert router.metric(f"kvhearth_router_{table}") == 0, table
    assert router.metric("kvhearth_router_requests_total", status_class="2xx") == REQUESTS
    assert sum(len(engine.requests) for engine in engines) >= REQUESTS
    inner = router.inner
    assert [(e.requests_in_flight, e.tokens_in_flight) for e in inner.fleet.engines] == [(0, 0)] * 2
    assert all(len(e.connections) == len(e.idle) for e in inner.fleet.engines), "no connection is lost to a request"
    decisions = json.loads(wire.get("/debug/decision?last=1000")[2])["decisions"]
    assert len(decisions) == 64
