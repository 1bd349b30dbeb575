"""Turns."""

from __future__ import annotations

from kvhearth.routing.policies.round_robin import MAX_SETS, RoundRobin
from kvhearth.routing.ports import EngineView, RouteRequest


def views(*names: str) -> list[EngineView]:
    return [EngineView(name, 0, 0) for name in names]


def test_case_10_two_models_on_two_engines_each_alternate():
    policy = RoundRobin()
    sets = {"one": views("a", "b"), "two": views("c", "d")}
    seen = {"one": [], "two": []}
    for model in ("one", "two", "one", "two", "two", "one", "two", "one"):
        seen[model].append(policy.pick(RouteRequest(model, [], 1), sets[model]).engine)
    assert seen == {"one": ["a", "b", "a", "b"], "two": ["c", "d", "c", "d"]}


def test_an_engine_that_leaves_and_returns_gets_its_share_again():
    policy = RoundRobin()
    request = RouteRequest("m", [], 1)
    for _ in range(3):
        policy.pick(request, views("a", "b"))
    policy.engine_gone("b")
    assert [policy.pick(request, views("a")).engine for _ in range(2)] == ["a", "a"]
    assert [policy.pick(request, views("a", "b")).engine for _ in range(4)] == ["a", "b", "a", "b"]


def test_memory_is_bounded_by_the_number_of_sets():
    policy = RoundRobin()
    for number in range(MAX_SETS * 3):
        policy.pick(RouteRequest(str(number), [], 1), views("a"))
    assert len(policy._turns) == MAX_SETS
