"""The router queues nothing: requests that take long reach the engine all at once, and hold up nobody."""

from __future__ import annotations

import json
import threading

import pytest

from kvhearth.router.config import EventSource, KvSettings

AT_ONCE = 150
NOBODY = EventSource("tcp://127.0.0.1:1")


@pytest.mark.parametrize("policy", ["prefix", "kv-aware", "session", "random"])
def test_150_requests_of_one_prefix_are_all_at_the_one_engine_that_serves_the_model(lab, policy):
    engine, other = lab.engine("m"), lab.engine("other")
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, other, policy=policy, kv=KvSettings(events={"e0": NOBODY}, block_tokens=16))
    wires = [router.wire() for _ in range(AT_ONCE)]
    for number, wire in enumerate(wires):
        wire.post(json.dumps({"model": "m", "prompt": [*range(256), number]}).encode())
    lab.until(lambda: engine.serving == AT_ONCE)
    wire = router.wire()
    wire.prompt(model="other")
    assert wire.response()[0] == 200
    engine.let_go(AT_ONCE)
    assert [wire.response()[0] for wire in wires] == [200] * AT_ONCE
    lab.until(lambda: not router.inner.exchanges)


def test_requests_whose_ids_must_be_asked_for_wait_for_no_other(lab):
    """150 texts at once, all of whose ids come from the engine's own /tokenize before they are sent."""
    engine = lab.engine()
    tokenized, completed = lab.reply(body=b'{"count":3,"max_model_len":4096,"tokens":[1,2,3]}'), lab.gated(lab.reply())

    async def behave(engine, received, reader, writer):
        answer = tokenized if received.target == "/tokenize" else completed
        await answer(engine, received, reader, writer)

    engine.behave = behave
    router = lab.router(engine, policy="kv-aware", kv=KvSettings(events={"e0": NOBODY}, tokens_seconds=10))
    wires = [router.wire() for _ in range(AT_ONCE)]
    for number, wire in enumerate(wires):
        wire.prompt(f"{number} hello")

    def completions() -> int:
        return sum(request.target == "/v1/completions" for request in engine.requests)

    lab.until(lambda: completions() == AT_ONCE)
    engine.let_go(AT_ONCE)
    assert [wire.response()[0] for wire in wires] == [200] * AT_ONCE


def test_large_bodies_at_once_each_reach_the_engine_whole(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, policy="prefix")
    wires = [router.wire() for _ in range(30)]
    bodies = [json.dumps({"model": "m", "prompt": f"{n} " * 60_000}).encode() for n in range(10, 40)]
    senders = [threading.Thread(target=wire.post, args=(body,)) for wire, body in zip(wires, bodies, strict=True)]
    for sender in senders:
        sender.start()
    lab.until(lambda: engine.serving == 30)
    assert sorted(request.body for request in engine.requests) == sorted(bodies)
    engine.let_go(30)
    assert [wire.response()[0] for wire in wires] == [200] * 30
    for sender in senders:
        sender.join(10)
    assert router.metric("kvhearth_router_buffered_bytes") == 0
