"""A session stays where it is, moves only when its engine goes or is overloaded, and sessions spread evenly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.routing.policies.session import Session, SessionSettings
from kvhearth.routing.ports import EngineView, RouteRequest

NAMES = ("engine-0", "engine-1", "engine-2", "engine-3")


def idle(*names: str) -> list[EngineView]:
    return [EngineView(name, 0, 0) for name in names]


def request(session: str) -> RouteRequest:
    return RouteRequest("m", [], 100, session)


def homes(policy: Session, engines: list[EngineView], count: int = 2000) -> list[str | None]:
    return [policy.pick(request(f"user-{i}"), engines).engine for i in range(count)]


def test_a_session_keeps_its_engine_in_every_router_and_whatever_the_order():
    assert homes(Session(), idle(*NAMES)) == homes(Session(), idle(*reversed(NAMES)))


def test_sessions_spread_evenly():
    counts = Counter(homes(Session(), idle(*NAMES)))
    assert max(counts.values()) < 1.2 * 500
    assert min(counts.values()) > 0.8 * 500


def test_when_an_engine_leaves_only_its_sessions_move_and_they_come_back_with_it():
    policy = Session()
    before = homes(policy, idle(*NAMES))
    policy.engine_gone("engine-2")
    without = homes(policy, idle("engine-0", "engine-1", "engine-3"))
    for old, new in zip(before, without, strict=True):
        assert new == old or old == "engine-2"
    assert len({new for old, new in zip(before, without, strict=True) if old == "engine-2"}) == 3
    assert homes(policy, idle(*NAMES)) == before


def test_an_overloaded_engine_is_passed_over_for_the_sessions_second_choice():
    policy = Session()
    home = policy.pick(request("s"), idle(*NAMES)).engine
    loaded = [EngineView(name, 9, 50_000 if name == home else 0) for name in NAMES]
    decision = policy.pick(request("s"), loaded)
    assert decision.engine != home
    assert decision.reason == "the session's engine is full"
    assert decision.engine == policy.pick(request("s"), idle(*[name for name in NAMES if name != home])).engine


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=8), st.text(min_size=1))
def test_nobody_above_the_bound_is_ever_picked(loads: list[int], session: str):
    settings = SessionSettings(load_factor=1.25, load_slack_tokens=100)
    engines = [EngineView(str(number), 1, load) for number, load in enumerate(loads)]
    picked = Session(settings).pick(request(session), engines).engine
    assert loads[int(picked or "")] <= 1.25 * sum(loads) / len(loads) + 100


def test_without_a_session_the_least_loaded_engine_is_taken():
    engines = [EngineView("a", 1, 500), EngineView("b", 1, 20), EngineView("c", 1, 300)]
    assert Session().pick(request(""), engines).engine == "b"


def test_settings_out_of_range_are_refused_by_name():
    with pytest.raises(UserError, match="policy session, load_factor"):
        SessionSettings(load_factor=0.5)
    with pytest.raises(UserError, match="policy session, load_slack_tokens"):
        SessionSettings(load_slack_tokens=-1)
