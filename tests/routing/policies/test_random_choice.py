"""Any engine, evenly, and repeatably with a seed."""

from __future__ import annotations

from collections import Counter
from random import Random

from kvhearth.routing.policies.random_choice import RandomChoice
from kvhearth.routing.ports import EngineView, RouteRequest

REQUEST = RouteRequest("m", [], 1)
ENGINES = [EngineView("a", 0, 0), EngineView("b", 90, 90_000), EngineView("c", 0, 0)]


def test_every_engine_gets_its_share_whatever_its_load():
    policy = RandomChoice(Random(1))
    picked = Counter(policy.pick(REQUEST, ENGINES).engine for _ in range(3000))
    assert set(picked) == {"a", "b", "c"}
    assert min(picked.values()) > 900


def test_the_same_seed_draws_the_same():
    first, again = RandomChoice(Random(7)), RandomChoice(Random(7))
    assert [first.pick(REQUEST, ENGINES).engine for _ in range(20)] == [
        again.pick(REQUEST, ENGINES).engine for _ in range(20)
    ]
