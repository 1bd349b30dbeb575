"""Policies by name."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvhearth.errors import UserError
from kvhearth.routing.policies.kv_aware import KvAware
from kvhearth.routing.policies.prefix import Prefix, PrefixSettings
from kvhearth.routing.policies.session import SessionSettings
from kvhearth.routing.ports import EngineView, Hits, RouteRequest
from kvhearth.routing.registry import POLICY_NAMES, KvParts, make_policy


class Nothing:
    """An index that knows of nothing."""

    def match(self, keys: Sequence[int], targets: Sequence[str]) -> list[Hits]:
        return [Hits()] * len(targets)

    def speculate(self, target: str, keys: Sequence[int]) -> None:
        pass

    def silence(self, target: str) -> str:
        return ""


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_carries_its_name_picks_and_refuses(name):
    policy = make_policy(name, kv=KvParts(Nothing()))
    request = RouteRequest("m", [1, 2, 3], 100)
    assert policy.name == name
    assert policy.pick(request, [EngineView("a", 0, 0)]).engine == "a"
    refused = policy.pick(request, [])
    assert (refused.engine, refused.refusal) == (None, "no_healthy_engine")
    policy.engine_gone("a")
    policy.engine_gone("never seen")
    assert policy.pick(request, [EngineView("b", 0, 0)]).engine == "b"


def test_an_unknown_name_is_refused_with_the_known_ones():
    known = "kv-aware, least-loaded, prefix, random, round-robin, session"
    with pytest.raises(UserError, match=f"unknown policy 'sticky'; use one of {known}"):
        make_policy("sticky")


def test_kv_aware_without_an_index_is_refused_with_what_is_missing():
    with pytest.raises(UserError, match="kv-aware needs the engines' KV events"):
        make_policy("kv-aware")


def test_settings_reach_their_policies():
    prefix = make_policy("prefix", PrefixSettings(max_pieces=2))
    assert isinstance(prefix, Prefix)
    prefix.pick(RouteRequest("m", list(range(10)), 1), [EngineView("a", 0, 0)])
    assert prefix.size == 2

    engines = [EngineView("a", 1, 100), EngineView("b", 1, 0)]
    session = make_policy("session", session=SessionSettings(load_factor=1, load_slack_tokens=0))
    assert {session.pick(RouteRequest("m", (), 1, f"s{i}"), engines).engine for i in range(20)} == {"b"}

    parts = KvParts(Nothing())
    kv_aware = make_policy("kv-aware", kv=parts)
    assert isinstance(kv_aware, KvAware)
    assert kv_aware.predictor is parts.predictor

    draws = [make_policy("random", rng=Random(5)) for _ in range(2)]
    request = RouteRequest("m", (), 1)
    assert [draws[0].pick(request, engines).engine for _ in range(30)] == [
        draws[1].pick(request, engines).engine for _ in range(30)
    ]
