"""One prefix that everybody asks for does not gather all load on the engine that holds it."""

from __future__ import annotations

import json

import pytest

from kvhearth.router.config import EventSource, KvSettings

ENGINES = 4
AT_ONCE = 80
NOBODY = EventSource("tcp://127.0.0.1:1")


@pytest.mark.parametrize("policy", ["prefix", "kv-aware"])
def test_80_open_requests_of_one_prefix_keep_the_fullest_of_four_engines_near_the_mean(lab, policy):
    engines = [lab.engine() for _ in range(ENGINES)]
    for engine in engines:
        engine.behave = lab.gated(lab.reply())
    kv = KvSettings(events={"e0": NOBODY}, block_tokens=16)
    router = lab.router(*engines, policy=policy, kv=kv)
    hot = list(range(4000))
    wires = [router.wire() for _ in range(AT_ONCE)]
    for number, wire in enumerate(wires):
        wire.post(json.dumps({"model": "m", "prompt": [*hot, number]}).encode())
    lab.until(lambda: sum(engine.serving for engine in engines) == AT_ONCE)
    loads = [engine.serving for engine in engines]
    assert max(loads) <= 2 * AT_ONCE / ENGINES, loads
    for engine in engines:
        engine.let_go(AT_ONCE)
    assert [wire.response()[0] for wire in wires] == [200] * AT_ONCE


def test_while_little_is_open_the_holder_of_the_hot_prefix_keeps_it(lab):
    router = lab.router(*[lab.engine() for _ in range(ENGINES)], policy="prefix")
    wire = router.wire()
    homes = set()
    for number in range(40):
        wire.prompt("hot " * 1000 + str(number))
        homes.add(dict(wire.response()[1])["x-kvhearth-engine"])
    assert len(homes) == 1
