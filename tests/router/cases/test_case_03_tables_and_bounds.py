"""Whatever becomes of requests, no table of the router keeps them; and unique prompts without end keep to a bound."""

from __future__ import annotations

import itertools
import json
import threading
import tracemalloc

import pytest

from kvhearth.router.config import EventSource, KvSettings, Limits
from kvhearth.routing.index import KvIndex
from kvhearth.routing.policies.prefix import PrefixSettings

GAUGES = ("requests_in_flight", "in_flight_tokens", "prefill_tokens", "exchanges", "buffered_bytes")
CLIENTS, TURNS = 8, 6
NOBODY = EventSource("tcp://127.0.0.1:1")


def body(**fields) -> bytes:
    return json.dumps({"model": "m", "prompt": list(range(64)), **fields}).encode()


def everything_goes_wrong(router, number: int) -> None:
    """Requests that end in every way: well, refused by the engine, by the router, cut, and left by their client."""
    for turn in range(TURNS):
        wire = router.wire()
        wire.post(body(seed=number * 100 + turn))
        assert wire.response()[0] in {200, 502}
        wire.post(body(model="nobody has it"))
        assert wire.error()[0] == 404
        wire.post(b'{"model": ')
        assert wire.error()[0] == 400
        wire.post(b'{"model":"m","prompt":"' + b"x" * 70_000 + b'"}')
        assert wire.error()[0] == 413
        wire = router.wire()
        wire.post(body(stream=True, model="cut"))
        wire.rest()
        wire = router.wire()
        wire.post(body(stream=True, model="slow"))
        wire.close()


@pytest.mark.parametrize("policy", ["prefix", "kv-aware", "session"])
def test_every_way_that_a_request_can_end_leaves_every_table_empty(lab, policy):
    engines = [lab.engine("m"), lab.engine("m"), lab.engine("cut"), lab.engine("slow")]
    engines[1].behave = lab.hang_up()  # each of its requests is tried again elsewhere
    engines[2].behave = lab.events([b"data: 1\n\n"], die=True)
    engines[3].behave = lab.hang()
    kv = KvSettings(events={"e0": NOBODY}, block_tokens=16)
    router = lab.router(*engines, policy=policy, kv=kv, limits=Limits(max_body_bytes=65_536))
    clients = [threading.Thread(target=everything_goes_wrong, args=(router, number)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    lab.until(lambda: not router.inner.exchanges)
    for wire in lab.wires:
        wire.close()
    lab.until(lambda: not router.inner.clients)
    for gauge in GAUGES:
        assert router.metric(f"kvhearth_router_{gauge}") == 0, gauge
    assert router.metric("kvhearth_router_requests_total", status_class="4xx") == 3 * TURNS * CLIENTS
    assert router.metric("kvhearth_router_requests_total", status_class="cut") >= TURNS * CLIENTS
    lab.until(lambda: engines[3].serving == 0)


def test_unique_prompts_keep_the_text_index_within_its_bound(lab):
    router = lab.router(lab.engine(), lab.engine(), policy="prefix", prefix=PrefixSettings(max_pieces=500))
    wire = router.wire()
    for number in range(200):
        wire.prompt(f"{number} is all that is new " * 200)
        assert wire.response()[0] == 200
    assert 0 < router.metric("kvhearth_router_prefix_index_pieces") <= 500


def test_unique_prompts_keep_the_kv_index_within_its_bytes(lab):
    kv = KvSettings(events={"e0": NOBODY}, block_tokens=16, index_bytes=1 << 20)
    router = lab.router(lab.engine(), lab.engine(), policy="kv-aware", kv=kv)
    wire = router.wire()
    for number in range(200):
        wire.post(body(prompt=[number, *range(1600)]))
        assert wire.response()[0] == 200
    assert 0 < router.metric("kvhearth_router_index_bytes") <= 1 << 20


def test_one_prompt_sent_again_and_again_before_any_event_keeps_the_kv_index_within_its_bytes():
    seconds = itertools.count()
    index = KvIndex(max_bytes=1 << 20, now=lambda: next(seconds) / 1000)
    tracemalloc.start()
    try:
        for _ in range(300):
            index.speculate("e0", [int(f"{key}") for key in range(1 << 62, (1 << 62) + 500)])  # each request's own
        assert tracemalloc.get_traced_memory()[0] <= 1 << 20
    finally:
        tracemalloc.stop()


def test_names_of_models_that_do_not_exist_add_nothing_to_the_metrics(lab):
    router = lab.router(lab.engine())
    wire = router.wire()
    wire.prompt(model="first")
    assert wire.error()[0] == 404
    samples = sum(len(family) for family in router.metrics().values())
    for number in range(100):
        wire.prompt(model=f"invented {number}")
        assert wire.error()[0] == 404
    assert sum(len(family) for family in router.metrics().values()) == samples
