"""Prefill and decode on engines of their own: the prefill is small and first, the decode waits for what it promised."""

from __future__ import annotations

import json
import threading
import time

import pytest

from kvhearth.emulator.store_io import StoreIo
from kvhearth.engine import OffloadMode
from kvhearth.router.config import Disaggregation, Limits
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

LONG = "word " * 2000
ANSWER = json.dumps({"choices": [], "usage": {"prompt_tokens": 2001, "completion_tokens": 1}}).encode()


def pools(lab, prefill: int = 1, decode: int = 1, **options):
    """A router over that many engines of each role, and the engines."""
    prefillers = [lab.engine() for _ in range(prefill)]
    decoders = [lab.engine() for _ in range(decode)]
    for engine in prefillers:
        engine.behave = lab.reply(200, ANSWER)
    roles = {f"e{number}": "prefill" if number < prefill else "decode" for number in range(prefill + decode)}
    return lab.router(*prefillers, *decoders, roles=roles, **options), prefillers, decoders


def ask(wire, target: str = "/v1/completions", **more):
    wire.post(json.dumps({"model": "m", "prompt": LONG, **more}).encode(), target=target, headers="X-Mine: yes\r\n")
    return wire.response()


@pytest.mark.parametrize("target", ["/v1/completions", "/v1/chat/completions"])
def test_a_prefill_is_one_token_without_a_stream_and_the_decode_is_what_the_client_asked(lab, target):
    router, [prefill], [decode] = pools(lab)
    more = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5, "max_completion_tokens": 40}
    status, lines, _ = ask(router.wire(), target, max_tokens=50, n=2, temperature=0.5, **more)
    assert (status, dict(lines)["x-kvhearth-engine"]) == (200, "e1")
    asked = json.loads(prefill.requests[0].body)
    assert (asked["stream"], asked["max_tokens"], asked["max_completion_tokens"]) == (False, 1, 1)
    assert asked["temperature"] == 0.5
    assert not asked.keys() & {"min_tokens", "stream_options", "n"}
    assert prefill.requests[0].target == target
    assert prefill.requests[0].header("x-mine") == ["yes"]
    sent = json.loads(decode.requests[0].body)
    assert sent.pop("kv_transfer_params") == {"kvhearth": {"await_tokens": 2001, "await_seconds": 5.0}}
    assert sent == {"model": "m", "prompt": LONG, "max_tokens": 50, "n": 2, "temperature": 0.5, **more}
    assert decode.requests[0].header("content-length") == [str(len(decode.requests[0].body))]
    assert router.metric("kvhearth_router_prefills_total", outcome="done") == 1


def test_decode_is_dispatched_only_after_prefill_is_done(lab):
    router, [prefill], [decode] = pools(lab)
    prefill.behave = lab.gated(lab.reply(200, ANSWER))
    wire = router.wire()
    wire.prompt(LONG)
    lab.until(lambda: prefill.serving == 1)
    assert router.metric("kvhearth_router_requests_in_flight", engine="e1") == 1, "its place there is kept"
    assert decode.requests == []
    prefill.let_go()
    assert wire.response()[0] == 200
    assert len(decode.requests) == 1
    for engine in ("e0", "e1"):
        assert router.metric("kvhearth_router_requests_in_flight", engine=engine) == 0
        assert router.metric("kvhearth_router_prefill_tokens", engine=engine) == 0


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
def test_an_error_in_decode_keeps_its_status(lab, status):
    router, _, [decode] = pools(lab)
    decode.behave = lab.reply(status, b'{"error":"of decode"}')
    assert ask(router.wire())[::2] == (status, b'{"error":"of decode"}')


def test_through_nixl_the_decode_engine_is_told_what_the_prefill_engine_said(lab):
    told = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [1, 2], "remote_port": 5600}
    router, [prefill], [decode] = pools(lab, disaggregation=Disaggregation(transfer="nixl"))
    prefill.behave = lab.reply(200, json.dumps({"kv_transfer_params": told}).encode())
    assert ask(router.wire())[0] == 200
    params = json.loads(prefill.requests[0].body)["kv_transfer_params"]
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert json.loads(decode.requests[0].body)["kv_transfer_params"] == told


@pytest.mark.parametrize(
    ("behave", "outcome"),
    [("refuses", "refused"), ("fails", "refused"), ("hangs up", "lost"), ("no json", "refused")],
)
def test_a_prefill_that_fails_is_left_to_the_decode_engine(lab, behave, outcome):
    router, [prefill], [decode] = pools(lab)
    prefill.behave = {
        "refuses": lab.reply(400, b"{}"),
        "fails": lab.reply(500, b"{}"),
        "hangs up": lab.hang_up(),
        "no json": lab.reply(200, b"oh"),
    }[behave]
    assert ask(router.wire())[0] == 200
    assert "kv_transfer_params" not in json.loads(decode.requests[0].body)
    assert router.metric("kvhearth_router_prefills_total", outcome=outcome) == 1


def test_a_prefill_engine_that_is_full_is_not_waited_for(lab):
    router, [prefill], decoders = pools(lab, decode=2, limits=Limits(max_requests_per_engine=1))
    prefill.behave = lab.gated(lab.reply(200, ANSWER))
    first = router.wire()
    first.prompt(LONG)
    lab.until(lambda: prefill.serving == 1)
    assert ask(router.wire())[0] == 200
    assert router.metric("kvhearth_router_prefills_total", outcome="full") == 1
    prefill.let_go()
    assert first.response()[0] == 200
    assert [len(engine.requests) for engine in decoders] == [1, 1]


@pytest.mark.parametrize(("prompt", "outcome"), [("short", "short"), ([LONG, LONG], "shape")])
def test_what_is_short_or_several_prompts_is_prefilled_where_it_is_decoded(lab, prompt, outcome):
    router, [prefill], [decode] = pools(lab)
    wire = router.wire()
    wire.post(json.dumps({"model": "m", "prompt": prompt}).encode())
    assert wire.response()[0] == 200
    assert (len(prefill.requests), len(decode.requests)) == (0, 1)
    assert router.metric("kvhearth_router_prefills_total", outcome=outcome) == 1


def test_when_the_client_leaves_during_prefill_that_engine_sees_it_and_no_other_is_asked(lab):
    router, [prefill], [decode] = pools(lab)
    prefill.behave = lab.hang()
    wire = router.wire()
    wire.prompt(LONG)
    lab.until(lambda: prefill.serving == 1)
    wire.close()
    lab.until(lambda: prefill.disconnects == 1)
    lab.until(lambda: router.metric("kvhearth_router_exchanges") == 0)
    assert decode.requests == []
    assert router.metric("kvhearth_router_requests_in_flight") == 0


def test_a_decode_engine_that_dies_meanwhile_is_replaced_by_another(lab):
    router, [prefill], decoders = pools(lab, decode=2)
    prefill.behave = lab.gated(lab.reply(200, ANSWER))
    wire = router.wire()
    wire.prompt(LONG)
    lab.until(lambda: prefill.serving == 1)
    loaded = [n for n in (1, 2) if router.metric("kvhearth_router_requests_in_flight", engine=f"e{n}")]
    decoders[loaded[0] - 1].die()
    status, lines, _ = wire.response()
    assert (status, dict(lines)["x-kvhearth-engine"]) == (200, f"e{3 - loaded[0]}")
    lab.until(lambda: router.metric("kvhearth_router_requests_in_flight") == 0)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 3), (3, 1), (2, 2)])
def test_any_number_of_each_serves_many_at_once(lab, prefill, decode):
    router, prefillers, decoders = pools(lab, prefill, decode)
    statuses: list[int] = []

    def client() -> None:
        wire = router.wire()
        statuses.extend(ask(wire)[0] for _ in range(10))

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert statuses == [200] * 80
    for engines in (prefillers, decoders):
        assert sum(len(engine.requests) for engine in engines) == 80
        assert all(engine.requests for engine in engines)
    promised = [json.loads(r.body)["kv_transfer_params"] for engine in decoders for r in engine.requests]
    assert all(params["kvhearth"]["await_tokens"] == 2001 for params in promised)


BLOCK, BLOCKS_PER_CHUNK, REQUESTS = 16, 4, 24
CHUNK = BLOCK * BLOCKS_PER_CHUNK


@pytest.fixture
def store(tmp_path):
    """Address of a store."""
    server = StoreServer(StoreConfig(64 << 20, listen=None, unix=tmp_path / "store", max_items=50_000)).start()
    yield f"unix:{tmp_path / 'store'}"
    server.stop()


def decode_hits(engines) -> tuple[float, float]:
    """Prompt tokens that these engines took from the store, and those that they computed."""
    counters = [engine.http.get("/emulator/state").json()["counters"] for engine in engines]
    return sum(c["prompt_tokens_store"] for c in counters), sum(c["prompt_tokens_compute"] for c in counters)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (1, 3)])
def test_what_prefill_computed_decode_takes_from_the_store_under_load(emulate, store, monkeypatch, prefill, decode):
    """Puts are slow, so that a decode comes before the chunks that it was promised; it waits for them."""
    slow = StoreIo._put

    def put(self, client, keys):
        time.sleep(0.02)
        return slow(self, client, keys)

    monkeypatch.setattr(StoreIo, "_put", put)
    roles = {f"e{number}": "prefill" if number < prefill else "decode" for number in range(prefill + decode)}
    fleet = emulate(
        prefill + decode,
        options={"policy": "least-loaded", "roles": roles, "disaggregation": Disaggregation(local_prefill_tokens=64)},
        offload_mode=OffloadMode.SHARED,
        store=store,
        store_deadline_seconds=5.0,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        dram_bytes=1 << 30,
        num_gpu_blocks_override=4097,
        time_scale=2.0,
    )
    answers: dict[int, tuple[int, dict]] = {}

    def client(numbers) -> None:
        wire = fleet.router.wire()
        for number in numbers:
            prompt = f"{number} " + f"{number * 7919} word " * 300
            wire.post(json.dumps({"model": "m", "prompt": prompt, "max_tokens": 4}).encode())
            status, _, body = wire.response()
            answers[number] = (status, json.loads(body))

    threads = [threading.Thread(target=client, args=(range(start, REQUESTS, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [status for status, _ in answers.values()] == [200] * REQUESTS
    usages = [answer["usage"] for _, answer in answers.values()]
    assert all(usage["completion_tokens"] == 4 for usage in usages)
    restorable = sum(usage["prompt_tokens"] // CHUNK * CHUNK for usage in usages)
    from_store, computed = decode_hits(fleet.engines[prefill:])
    assert from_store >= 0.99 * restorable
    assert computed <= sum(usage["prompt_tokens"] for usage in usages) - 0.99 * restorable
    assert fleet.router.metric("kvhearth_router_prefills_total", outcome="done") == REQUESTS


def test_a_promise_that_is_not_kept_delays_a_decode_and_no_more(emulate, store):
    fleet = emulate(
        1,
        options={"policy": "round-robin"},
        offload_mode=OffloadMode.SHARED,
        store=store,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        time_scale=1.0,
    )
    wire = fleet.router.wire()
    body = {"model": "m", "prompt": "word " * 300, "max_tokens": 2}
    promise = {"kvhearth": {"await_tokens": 1500, "await_seconds": 0.5}}
    started = time.monotonic()
    wire.post(json.dumps({**body, "kv_transfer_params": promise}).encode())
    assert wire.response()[0] == 200
    assert time.monotonic() - started >= 0.45
