"""Requests go where their first token is predicted soonest: to the holder, unless others would be sooner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.cost import CostModel
from kvhearth.errors import UserError
from kvhearth.routing.policies.kv_aware import KvAware, KvAwareSettings
from kvhearth.routing.ports import EngineView, Hits, RouteRequest
from kvhearth.routing.ttft import LearnedCost, ModelledCost, Predictor

BLOCK = 16
COST = ModelledCost(CostModel("llama-3.1-8b", "h100-sxm"))


class Held:
    """An index by a set of keys for each target and tier, and the targets that say nothing."""

    def __init__(self, silent: Sequence[str] = ()) -> None:
        self.tiers: dict[str, tuple[set[int], set[int], set[int]]] = {}
        self.silent = silent

    def add(self, target: str, tier: int, keys: Sequence[int]) -> None:
        self.tiers.setdefault(target, (set(), set(), set()))[tier].update(keys)

    def match(self, keys: Sequence[int], targets: Sequence[str]) -> list[Hits]:
        return [Hits(*self._match(keys, target)) for target in targets]

    def _match(self, keys: Sequence[int], target: str) -> list[int]:
        counts, at = [], 0
        for held in self.tiers.get(target, (set(), set(), set())):
            begun = at
            while at < len(keys) and keys[at] in held:
                at += 1
            counts.append(at - begun)
        return counts

    def speculate(self, target: str, keys: Sequence[int]) -> None:
        self.add(target, 0, keys)

    def silence(self, target: str) -> str:
        return "no_events" if target in self.silent else ""


def idle(*names: str) -> list[EngineView]:
    return [EngineView(name, 0, 0) for name in names]


def request(*keys: int, extra: int = 0) -> RouteRequest:
    return RouteRequest("m", (), len(keys) * BLOCK + extra, "", keys, BLOCK)


def kv_aware(held: Held, **options: float) -> KvAware:
    return KvAware(held, Predictor(COST), Random(0), KvAwareSettings(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["abc", "cba", "bac"])
def test_case_8_the_longest_holder_wins_whatever_its_place(order: str):
    held = Held()
    held.add("a", 0, range(100))
    held.add("b", 0, range(300))
    held.add("c", 0, range(200))
    decision = kv_aware(held).pick(request(*range(400)), idle(*order))
    assert (decision.engine, decision.hits, decision.miss_reason) == ("b", Hits(hbm=4800), "")
    assert decision.predicted_seconds == pytest.approx(COST.compute_seconds(1600, 4800))


def test_what_lies_nearer_wins_and_any_tier_beats_computing():
    order = ("hbm", "dram", "store", "nothing")
    for most, best in enumerate(order):
        held = Held()
        for tier, name in enumerate(order[:3]):
            held.add(name, tier, range(400))
        rest = idle(*reversed(order[most:]))
        assert kv_aware(held).pick(request(*range(400), extra=40), rest).engine == best


def test_a_hot_prefix_leaves_its_holder_when_the_queue_there_is_longer_than_computing_it():
    held = Held()
    held.add("a", 0, range(300))
    wanted = request(*range(300), extra=50)
    short = [EngineView("a", 1, 5000, prefill_tokens=3000), EngineView("b", 0, 0)]
    assert kv_aware(held, decode_tokens=0).pick(wanted, short).engine == "a"
    long = [EngineView("a", 1, 9000, prefill_tokens=9000), EngineView("b", 0, 0)]
    decision = kv_aware(held, decode_tokens=0).pick(wanted, long)
    assert (decision.engine, decision.hits, decision.miss_reason) == ("b", Hits(), "holder_busy")


@pytest.mark.parametrize("shared_blocks", [8, 60, 250])
@pytest.mark.parametrize("requests", [64, 256])
def test_case_9_a_burst_behind_one_prefix_spreads_over_the_engines(shared_blocks: int, requests: int):
    """None has finished yet, and each prefill is over before the next request comes: nothing but decodes to see."""
    policy = kv_aware(Held())
    tokens = dict.fromkeys("abcd", 0)
    counts: Counter[str] = Counter()
    for number in range(requests):
        wanted = request(*range(shared_blocks), *range(10_000 + 4 * number, 10_004 + 4 * number))
        decision = policy.pick(wanted, [EngineView(name, counts[name], tokens[name]) for name in "abcd"])
        assert decision.engine is not None
        counts[decision.engine] += 1
        tokens[decision.engine] += wanted.prompt_tokens
    assert max(counts.values()) / (requests / 4) <= 1.5


def test_a_dispatch_is_noted_so_that_the_next_like_it_goes_there_too():
    policy = kv_aware(Held())
    first = policy.pick(request(*range(100), extra=5), idle("a", "b", "c"))
    assert first.miss_reason == "not_held"
    second = policy.pick(request(*range(100), extra=5), idle("a", "b", "c"))
    assert (second.engine, second.hits) == (first.engine, Hits(hbm=1600))


def test_equals_are_drawn_evenly_and_repeatably():
    def draw(seed: int) -> list[str | None]:
        policy = KvAware(Held(), Predictor(COST), Random(seed))
        return [policy.pick(request(1000 + i), idle("a", "b", "c")).engine for i in range(300)]

    counts = Counter(draw(1))
    assert min(counts.values()) > 60
    assert len(counts) == 3
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_of_nearly_equal_ones_the_less_loaded_is_taken():
    policy = kv_aware(Held(), tie_share=0.05)
    engines = [EngineView("a", 3, 9), EngineView("b", 1, 4), EngineView("c", 2, 5)]
    assert policy.pick(request(*range(200)), engines).engine == "b"


@pytest.mark.parametrize(("factor", "picked"), [(1.5, "slow"), (3.0, "fast")])
def test_an_engine_that_takes_longer_than_predicted_is_avoided_by_as_much(factor: float, picked: str):
    held = Held()
    held.add("slow", 0, range(200))
    engines = [EngineView("slow", 0, 0, ttft_factor=factor), EngineView("fast", 0, 0)]
    assert kv_aware(held).pick(request(*range(400)), engines).engine == picked


def test_the_last_token_of_a_prompt_is_always_computed():
    held = Held()
    held.add("hbm", 0, range(10))
    held.add("dram", 1, range(10))
    held.add("store", 2, range(10))
    held.add("mixed", 0, range(4))
    held.add("mixed", 1, range(10))
    scores = kv_aware(held).scores(request(*range(10)), idle("hbm", "dram", "store", "mixed"))
    assert [score.hits for score in scores] == [
        Hits(hbm=144),
        Hits(dram=159),
        Hits(store=159),
        Hits(hbm=64, dram=95),
    ]


@pytest.mark.parametrize(
    ("wanted", "silent", "reason"),
    [
        (request(1, 2, 3), "ab", "no_events"),
        (request(1, 2, 3), "", "not_held"),
        (RouteRequest("m", (), 9, "", (), BLOCK), "", "short_prompt"),
        (RouteRequest("m", (1, 2), 900, unkeyed="tokenizer_missing"), "", "tokenizer_missing"),
        (RouteRequest("m", (1, 2), 900), "", "no_tokens"),
    ],
)
def test_case_8_a_miss_says_why(wanted: RouteRequest, silent: str, reason: str):
    assert kv_aware(Held(silent)).pick(wanted, idle("a", "b")).miss_reason == reason


def test_without_token_ids_it_routes_by_text():
    policy = kv_aware(Held())
    wanted = RouteRequest("m", (1, 2, 3), 200, unkeyed="tokenizer_missing")
    first = policy.pick(wanted, idle("a", "b", "c"))
    again = [policy.pick(wanted, idle("c", "b", "a")) for _ in range(5)]
    assert {decision.engine for decision in again} == {first.engine}
    assert again[0].matched == 3
    policy.engine_gone(first.engine or "")
    assert policy.pick(wanted, idle("a", "b", "c")).matched == 0


def test_a_learned_rate_serves_where_there_is_no_cost_model():
    held = Held()
    held.add("b", 0, range(300))
    policy = KvAware(held, Predictor(LearnedCost()), Random(0))
    assert policy.pick(request(*range(300), extra=9), idle("a", "b", "c")).engine == "b"
    loaded = [EngineView("a", 0, 0), EngineView("b", 40, 80_000, prefill_tokens=9000)]
    assert policy.pick(request(*range(300), extra=9), loaded).engine == "a"


def test_scores_explain_the_pick_and_change_nothing():
    held = Held()
    held.add("b", 0, range(50))
    policy = kv_aware(held)
    engines = [EngineView("a", 1, 4000, 4000), EngineView("b", 2, 900, 700), EngineView("c", 0, 0)]
    wanted = request(*range(60), extra=3)
    scores = policy.scores(wanted, engines)
    assert policy.scores(wanted, engines) == scores
    decision = policy.pick(wanted, engines)
    best = min(scores, key=lambda score: score.seconds)
    assert decision.engine == best.target
    assert decision.predicted_seconds == pytest.approx(best.prediction.seconds)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20_000), st.integers(0, 50_000)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 20),
    st.integers(0, 15),
)
def test_no_target_is_much_sooner_than_the_one_picked(
    targets: list[tuple[int, int, int, int]], blocks: int, extra: int
):
    held = Held()
    engines = []
    for number, (hbm, dram, prefill, tokens) in enumerate(targets):
        held.add(str(number), 0, range(hbm))
        held.add(str(number), 1, range(hbm + dram))
        engines.append(EngineView(str(number), 1, tokens, prefill))
    policy = kv_aware(held)
    wanted = request(*range(blocks), extra=extra)
    scores = {score.target: score for score in policy.scores(wanted, engines)}
    decision = policy.pick(wanted, engines)
    best = min(score.seconds for score in scores.values())
    assert decision.engine is not None
    assert scores[decision.engine].seconds <= max(best * 1.01, best + 0.001) + 1e-9
    assert sum(decision.hits) < wanted.prompt_tokens


def test_settings_out_of_range_are_refused_by_name():
    with pytest.raises(UserError, match="policy kv-aware, tie_share"):
        KvAwareSettings(tie_share=-0.1)
