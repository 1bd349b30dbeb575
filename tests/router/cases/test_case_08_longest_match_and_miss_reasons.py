"""The longest match wins, whoever holds the shorter ones; and a miss says why."""

from __future__ import annotations

import json

import pytest

from kvhearth.router.config import EventSource, KvSettings, Limits

PREFIX = list(range(1000, 1640))
NOBODY = EventSource("tcp://127.0.0.1:1")


@pytest.mark.parametrize("longest", [0, 2])
def test_of_three_holders_the_one_with_the_longest_match_answers(emulate, longest):
    emulated = emulate(3)
    lengths = [160, 320, 480]
    lengths[longest] = 640
    for engine, length in zip(emulated.engines, lengths, strict=True):
        engine.compute([*PREFIX[:length], 7])
    emulated.until_all_told()
    wire = emulated.router.wire()
    wire.post(json.dumps({"model": "m", "prompt": [*PREFIX, 8, 9], "max_tokens": 1}).encode())
    told = dict(wire.response()[1])
    assert told["x-kvhearth-engine"] == f"e{longest}"
    assert told["x-kvhearth-hit"] == "tokens=640, hbm=640, dram=0, store=0"


def test_by_text_too_the_longer_match_wins_over_the_one_that_was_there_first(lab):
    engines = [lab.engine(), lab.engine()]
    router = lab.router(*engines, policy="prefix", limits=Limits(max_requests_per_engine=1))
    wire, busy = router.wire(), router.wire()
    short, longer = "a" * 2560, "a" * 2560 + "b" * 2560
    wire.prompt(short)
    first = engines[int(dict(wire.response()[1])["x-kvhearth-engine"].removeprefix("e"))]
    first.behave = lab.gated(lab.reply())
    busy.prompt(short)
    lab.until(lambda: first.serving == 1)
    wire.prompt(longer)  # its holder is full
    other = dict(wire.response()[1])["x-kvhearth-engine"]
    first.let_go()
    assert busy.response()[0] == 200
    wire.prompt(longer + "c" * 2560)
    told = dict(wire.response()[1])
    assert (told["x-kvhearth-engine"], told["x-kvhearth-hit"]) == (other, "pieces=20/30")
    assert len(engines[0].requests) == len(engines[1].requests) == 2


@pytest.mark.parametrize(
    ("fields", "answer", "reason"),
    [
        ({"prompt": [1, 2, 3, 4, 5]}, b"{}", "no_events"),
        ({"prompt": "x" * 1000}, b"{}", "refused"),
        ({"prompt": "x" * 1000}, b"not json", "refused"),
    ],
    ids=["nobody told of blocks", "no ids", "no JSON"],
)
def test_a_miss_says_why(lab, fields, answer, reason):
    engine = lab.engine()
    engine.behave = lab.reply(body=answer)
    router = lab.router(engine, policy="kv-aware", kv=KvSettings(events={"e0": NOBODY}, block_tokens=4))
    wire = router.wire()
    wire.post(json.dumps({"model": "m", **fields}).encode())
    assert wire.response()[0] == 200
    misses = router.metrics()["kvhearth_router_misses_total"]
    assert {dict(labels)["reason"]: count for labels, count in misses.items()} == {reason: 1}
    assert reason.replace("_", " ") in wire.get("/debug/decision?last=1")[2].decode().replace("_", " ")


def test_a_miss_whose_ids_come_too_late_says_so(lab):
    engine = lab.engine()
    plain = lab.reply()

    async def behave(engine, received, reader, writer):
        if received.target == "/v1/completions":
            await plain(engine, received, reader, writer)
        else:
            await lab.hang()(engine, received, reader, writer)

    engine.behave = behave
    router = lab.router(engine, policy="kv-aware", kv=KvSettings(events={"e0": NOBODY}, tokens_seconds=0.1))
    wire = router.wire()
    wire.prompt("x" * 1000)
    assert wire.response()[0] == 200
    assert router.metric("kvhearth_router_misses_total", reason="late") == 1
