"""Round robin keeps its turn for each set of engines: models that share engines do not disturb each other."""

from __future__ import annotations

from collections import Counter


def answered_by(wire, model: str) -> str:
    wire.prompt(model=model)
    status, lines, _ = wire.response()
    assert status == 200
    return dict(lines)["x-kvhearth-engine"]


def test_models_on_overlapping_engines_each_take_turns(lab):
    wire = lab.router(lab.engine("a"), lab.engine("a", "b"), lab.engine("b"), policy="round-robin").wire()
    seen: dict[str, list[str]] = {"a": [], "b": []}
    for model in "aabbabbaaabb":
        seen[model].append(answered_by(wire, model))
    for names in seen.values():
        assert Counter(names) == dict.fromkeys(names[:2], 3)
        assert names == names[:2] * 3, "strictly in turn"


def test_two_engines_take_turns_however_many_clients_ask_for_either_model(lab):
    engines = [lab.engine("a", "b"), lab.engine("a", "b")]
    router = lab.router(*engines, policy="round-robin")
    seen: Counter[tuple[str, str]] = Counter()
    wires = [router.wire() for _ in range(20)]
    for turn in range(4):
        for number, wire in enumerate(wires):
            wire.prompt(model="ab"[(number + turn) % 2])
        for number, wire in enumerate(wires):
            seen["ab"[(number + turn) % 2], dict(wire.response()[1])["x-kvhearth-engine"]] += 1
    assert seen == {(model, engine): 20 for model in "ab" for engine in ("e0", "e1")}


def test_turns_go_on_among_those_that_are_left_and_with_those_that_come_back(lab):
    engines = [lab.engine(), lab.engine(), lab.engine()]
    router = lab.router(*engines, policy="round-robin")
    wire = router.wire()
    engines[1].die()
    lab.until(lambda: len(router.inner.fleet.healthy()) == 2)
    assert Counter(answered_by(wire, "m") for _ in range(8)) == {"e0": 4, "e2": 4}
    engines[1].start()
    lab.until(lambda: len(router.inner.fleet.healthy()) == 3)
    assert Counter(answered_by(wire, "m") for _ in range(9)) == {"e0": 3, "e1": 3, "e2": 3}
