"""Policies by name."""

from __future__ import annotations

import pytest

from kvhearth.errors import UserError
from kvhearth.routing.policies.prefix import Prefix, PrefixSettings
from kvhearth.routing.ports import EngineView, RouteRequest
from kvhearth.routing.registry import POLICY_NAMES, make_policy


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_carries_its_name_picks_and_refuses(name):
    policy = make_policy(name)
    request = RouteRequest("m", [1, 2, 3], 100)
    assert policy.name == name
    assert policy.pick(request, [EngineView("a", 0, 0)]).engine == "a"
    refused = policy.pick(request, [])
    assert (refused.engine, refused.refusal) == (None, "no_healthy_engine")
    policy.engine_gone("a")
    policy.engine_gone("never seen")
    assert policy.pick(request, [EngineView("b", 0, 0)]).engine == "b"


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="unknown policy 'random'; use one of least-loaded, prefix, round-robin"):
        make_policy("random")


def test_settings_reach_the_prefix_policy():
    policy = make_policy("prefix", PrefixSettings(max_pieces=2))
    assert isinstance(policy, Prefix)
    policy.pick(RouteRequest("m", list(range(10)), 1), [EngineView("a", 0, 0)])
    assert policy.size == 2
