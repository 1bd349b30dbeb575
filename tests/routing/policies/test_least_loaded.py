"""Balance by tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.routing.policies.least_loaded import LeastLoaded
from kvhearth.routing.ports import EngineView, RouteRequest

REQUEST = RouteRequest("m", [], 1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_never_more_than_the_least(loads):
    engines = [EngineView(str(number), 9 - load, load) for number, load in enumerate(loads)]
    picked = LeastLoaded().pick(REQUEST, engines).engine
    assert loads[int(picked)] == min(loads)


def test_equals_take_turns():
    policy = LeastLoaded()
    engines = [EngineView("a", 0, 7), EngineView("b", 0, 7), EngineView("c", 0, 8)]
    picked = [policy.pick(REQUEST, engines).engine for _ in range(10)]
    assert picked.count("a") == picked.count("b") == 5
