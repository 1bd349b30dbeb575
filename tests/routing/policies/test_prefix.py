"""Prompts go where their beginning is; memory and imbalance stay bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.routing.policies.prefix import Prefix, PrefixSettings
from kvhearth.routing.ports import EngineView, RouteRequest


def idle(*names: str) -> list[EngineView]:
    return [EngineView(name, 0, 0) for name in names]


def request(*pieces: int, tokens: int = 64) -> RouteRequest:
    return RouteRequest("m", pieces, tokens)


def test_case_8_the_longest_match_wins_not_the_first():
    policy = Prefix()
    assert policy.pick(request(1, 2), idle("a")).matched == 0
    policy.pick(request(1, 2, 3, 4), idle("b"))
    policy.pick(request(1, 2, 3), idle("c"))
    for order in (("a", "b", "c"), ("c", "b", "a"), ("b", "a", "c")):
        decision = policy.pick(request(1, 2, 3, 4, 5), idle(*order))
        assert (decision.engine, decision.reason) == ("b", "longest match")
    assert decision.matched == 5


def test_of_equal_matches_the_least_loaded_wins_and_without_a_match_too():
    policy = Prefix()
    for name in "ab":
        policy.pick(request(1, 2), idle(name))
    loaded = [EngineView("a", 1, 100), EngineView("b", 1, 50), EngineView("c", 0, 0)]
    assert policy.pick(request(1, 2), loaded).engine == "b"
    assert policy.pick(request(7, 8), loaded).engine == "c"


def test_a_header_common_to_all_prompts_does_not_gather_them():
    policy = Prefix()
    engines = idle("a", "b", "c", "d")
    homes = [policy.pick(request(0, *range(100 * n, 100 * n + 30)), engines).engine for n in range(1, 41)]
    assert {homes.count(name) for name in "abcd"} == {10}


def test_what_is_known_of_an_engine_ends_with_it():
    policy = Prefix()
    policy.pick(request(1, 2, 3), idle("a"))
    policy.pick(request(4, 5), idle("b"))
    policy.engine_gone("a")
    assert policy.size == 2
    assert policy.pick(request(1, 2, 3), idle("a", "b")).matched == 0
    assert policy.pick(request(4, 5), idle("a", "b")).engine == "b"


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2), max_size=8), st.booleans()), max_size=60),
    st.integers(1, 30),
)
def test_the_index_keeps_its_bound_and_matches_a_plain_model(steps, max_pieces):
    policy = Prefix(PrefixSettings(max_pieces=max_pieces))
    model: dict[str, list[tuple[int, ...]]] = {}  # engine → pieces, used longest ago first
    for name, path, gone in steps:
        pieces = [tuple(path[: n + 1]) for n in range(len(path))]
        if gone:
            policy.engine_gone(name)
            model.pop(name, None)
            continue
        held = model.setdefault(name, [])
        expected = next((n for n, piece in enumerate(pieces) if piece not in held), len(pieces))
        decision = policy.pick(request(*[hash(piece) for piece in pieces]), idle(name))
        assert decision.matched == expected
        for piece in reversed(pieces[:max_pieces]):
            if piece in held:
                held.remove(piece)
            held.append(piece)
        while (excess := sum(map(len, model.values())) - max_pieces) > 0:
            del max(model.values(), key=len)[:excess]
        assert policy.size == sum(map(len, model.values())) <= max_pieces


def test_case_3_a_million_unique_pieces_keep_the_index_at_its_bound():
    policy = Prefix(PrefixSettings(max_pieces=10_000))
    engines = idle("a", "b", "c", "d")
    for number in range(0, 1_000_000, 100):
        policy.pick(RouteRequest("m", range(number, number + 100), 1), engines)
        assert policy.size <= 10_000
    assert policy.size == sum(len(held) for held in policy._held.values()) == 10_000


def test_a_new_engine_is_not_starved_of_memory_by_those_before_it():
    policy = Prefix(PrefixSettings(max_pieces=1000))
    for number in range(2000):
        policy.pick(request(number), idle("old"))
    for number in range(2000, 4000):
        policy.pick(request(number), idle("new"))
    assert len(policy._held["new"]) >= 500


@pytest.mark.parametrize("tokens", [512, 30_000])
def test_case_9_one_hot_prefix_over_four_engines_is_spread_within_the_bound(tokens):
    rng = random.Random(1)
    limits = PrefixSettings(load_factor=1.25, load_slack_tokens=8192)
    policy = Prefix(limits)
    load = dict.fromkeys("abcd", 0)
    running: list[str] = []
    for step in range(3000):
        while len(running) >= 200:
            load[running.pop(rng.randrange(len(running)))] -= tokens
        engines = [EngineView(name, 0, load[name]) for name in "abcd"]
        chosen = policy.pick(request(*range(40), 10_000 + step, tokens=tokens), engines).engine
        load[chosen] += tokens
        running.append(chosen)
        mean = sum(load.values()) / 4
        assert max(load.values()) <= 1.25 * mean + 8192 + tokens
