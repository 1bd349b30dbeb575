"""Sessions, data-parallel ranks, and what is told about decisions."""

from __future__ import annotations

import json

import pytest

SESSION = {
    "header": lambda name: ({}, f"X-Session-Id: {name}\r\n"),
    "prompt_cache_key": lambda name: ({"prompt_cache_key": name}, ""),
    "user": lambda name: ({"user": name}, ""),
    "header before body": lambda name: ({"user": "everybody"}, f"x-session-id: {name}\r\n"),
    "prompt_cache_key before user": lambda name: ({"user": "everybody", "prompt_cache_key": name}, ""),
}


def engine_of(wire) -> str:
    return dict(wire.response()[1])["x-kvhearth-engine"]


@pytest.mark.parametrize("given", SESSION)
def test_a_session_stays_with_its_engine(lab, given):
    wire = lab.router(*[lab.engine() for _ in range(3)], policy="session").wire()
    homes: dict[str, set[str]] = {}
    for turn in range(3):
        for name in ("anna", "ben", "carl", "dora", "emil", "fritz", "gustav", "hans"):
            fields, headers = SESSION[given](name)
            wire.post(json.dumps({"model": "m", "prompt": f"{turn}", **fields}).encode(), headers=headers)
            homes.setdefault(name, set()).add(engine_of(wire))
    assert all(len(engines) == 1 for engines in homes.values())
    assert len(set.union(*homes.values())) > 1


def test_the_session_header_can_be_another_one(lab):
    router = lab.router(*[lab.engine() for _ in range(4)], policy="session", session_header="X-Chat")
    wire = router.wire()
    seen = set()
    for turn in range(8):
        wire.post(b'{"model":"m","prompt":"x"}', headers=f"x-chat: c\r\nx-session-id: {turn}\r\n")
        seen.add(engine_of(wire))
    assert len(seen) == 1


def test_each_data_parallel_rank_is_a_target_of_its_own(lab):
    engine, plain = lab.engine(), lab.engine("plain")
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, plain, data_parallel={"e0": 2})
    wires = [router.wire() for _ in range(4)]
    for number, wire in enumerate(wires):
        wire.post(b'{"model":"m","prompt":"xxxxxxxx"}', headers="X-Data-Parallel-Rank: 7\r\n")
        lab.until(lambda number=number: engine.serving == number + 1)
    assert sorted(request.header("x-data-parallel-rank") for request in engine.requests) == [["0"], ["0"], ["1"], ["1"]]
    assert router.metric("kvhearth_router_requests_in_flight", engine="e0#1") == 2
    assert router.metric("kvhearth_router_in_flight_tokens", engine="e0#0") == 4
    engine.let_go(4)
    assert sorted(engine_of(wire) for wire in wires) == ["e0#0", "e0#0", "e0#1", "e0#1"]
    assert router.metric("kvhearth_router_requests_in_flight") == 0
    wires[0].post(b'{"model":"plain","prompt":"x"}', headers="X-Data-Parallel-Rank: 0\r\n")
    assert engine_of(wires[0]) == "e1"
    assert plain.requests[0].header("x-data-parallel-rank") == ["0"]  # the client's, where the router has no choice


def test_an_engine_that_fails_is_retried_at_none_of_its_ranks(lab):
    failing, other = lab.engine(), lab.engine()
    failing.behave = lab.hang_up()
    wire = lab.router(failing, other, data_parallel={"e0": 4}).wire()
    wire.prompt()
    assert engine_of(wire) == "e1"


# Decisions explained


def test_a_decision_is_explained_by_the_number_in_its_response_or_the_requests_own_id(lab):
    wire = lab.router(lab.engine(), lab.engine(), policy="prefix").wire()
    for turn in range(2):
        wire.post(json.dumps({"model": "m", "prompt": "x" * 2560}).encode(), headers=f"X-Request-Id: mine-{turn}\r\n")
        lines = dict(wire.response()[1])
    assert lines["x-kvhearth-hit"] == "pieces=10/10"
    by_number = json.loads(wire.get(f"/debug/decision?id={lines['x-kvhearth-decision']}")[2])["decisions"]
    by_id = json.loads(wire.get("/debug/decision?id=mine-1")[2])["decisions"]
    assert by_number == by_id
    assert len(by_id) == 1
    assert (by_id[0]["engine"], by_id[0]["matched_pieces"]) == (lines["x-kvhearth-engine"], 10)
    assert "longest match" in by_id[0]["text"]
    assert [target["name"] for target in by_id[0]["targets"]] == ["e0", "e1"]


def test_the_last_decisions_are_listed_newest_first_and_older_ones_forgotten(lab):
    router = lab.router(lab.engine(), decisions_kept=3)
    wire = router.wire()
    for _ in range(5):
        wire.prompt()
        assert wire.response()[0] == 200
    told = json.loads(wire.get("/debug/decision")[2])["decisions"]
    assert [decision["id"] for decision in told] == [5, 4, 3]
    assert len(json.loads(wire.get("/debug/decision?last=1")[2])["decisions"]) == 1
    wire.send(b"GET /debug/decision?id=1 HTTP/1.1\r\nHost: r\r\n\r\n")
    assert wire.error()[0] == 404
    wire.send(b"GET /debug/decision?last=all HTTP/1.1\r\nHost: r\r\n\r\n")
    assert wire.error()[0] == 400


def test_decisions_are_told_to_those_with_the_key_only(lab):
    wire = lab.router(lab.engine(), api_key="sk-1").wire()
    wire.send(b"GET /debug/decision HTTP/1.1\r\nHost: r\r\n\r\n")
    assert wire.error()[0] == 401


# Tokens and times


def test_tokens_are_counted_from_the_engines_own_usage(lab):
    engine = lab.engine()
    usage = b'"usage":{"prompt_tokens":50,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":32}}'
    engine.behave = lab.reply(body=b'{"choices":[],%b}' % usage)
    router = lab.router(engine)
    wire = router.wire()
    wire.prompt()
    assert wire.response()[0] == 200
    engine.behave = lab.events([b'data: {"text":"a"}\n\n'] * 3 + [b"data: {%b}\n\n" % usage, b"data: [DONE]\n\n"])
    wire.prompt()
    assert wire.response()[0] == 200
    engine.behave = lab.reply(status=400, body=b"{%b}" % usage)
    wire.prompt()
    assert wire.response()[0] == 400
    tokens = {kind: router.metric("kvhearth_router_usage_tokens_total", kind=kind) for kind in ("prompt", "cached")}
    assert tokens == {"prompt": 100, "cached": 64}
    assert router.metric("kvhearth_router_usage_tokens_total", kind="completion", model="m") == 6
    assert router.metric("kvhearth_router_inter_token_seconds_count") == 1  # the stream


def test_prompts_count_as_prefill_until_their_first_byte(lab):
    engine = lab.engine()
    engine.behave = lab.events([b"data: 1\n\n", b"data: 2\n\n"], gated=True)
    router = lab.router(engine)
    wire = router.wire()
    wire.prompt("x" * 400)
    lab.until(lambda: engine.serving == 1)
    assert router.metric("kvhearth_router_prefill_tokens") == 100
    engine.let_go()
    wire.head()
    assert wire.chunk()
    assert router.metric("kvhearth_router_prefill_tokens") == 0
    assert router.metric("kvhearth_router_in_flight_tokens") == 100
    engine.let_go()
    assert wire.chunk()
    assert wire.chunk() == b""
    assert router.metric("kvhearth_router_in_flight_tokens") == 0
    wire.prompt("x" * 400)
    lab.until(lambda: engine.serving == 1)
    wire.close()
    lab.until(lambda: router.metric("kvhearth_router_prefill_tokens") == 0)
