"""A decision can be read: in numbers for a program, in words for a person."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

from kvhearth.routing.explain import explain
from kvhearth.routing.policies.kv_aware import KvAware
from kvhearth.routing.policies.prefix import Prefix
from kvhearth.routing.policies.round_robin import RoundRobin
from kvhearth.routing.ports import EngineView, Hits, RouteRequest
from kvhearth.routing.ttft import LearnedCost, Predictor


class Holds:
    """An index in which each named target holds so many blocks in HBM, DRAM and store."""

    def __init__(self, **hits: Hits) -> None:
        self._hits = hits

    def match(self, keys: Sequence[int], targets: Sequence[str]) -> list[Hits]:
        return [self._hits.get(target, Hits()) for target in targets]

    def speculate(self, target: str, keys: Sequence[int]) -> None:
        self._hits[target] = Hits(hbm=len(keys))

    def silence(self, target: str) -> str:
        return ""


REQUEST = RouteRequest("m", (), 1000, "user-7", tuple(range(62)), 16)


def kv_aware(holds: Holds) -> KvAware:
    return KvAware(holds, Predictor(LearnedCost(1000)), Random(0))


def test_a_hit_is_told_by_source_with_what_is_left_and_the_next_best():
    views = [EngineView("a", 1, 300, 200, waiting=1, running=2, ttft_factor=1.1), EngineView("b", 0, 0)]
    policy = kv_aware(Holds(a=Hits(40, 10, 5)))
    decision = policy.pick(REQUEST, views)
    told = explain(decision, REQUEST, views, policy.scores(REQUEST, views))
    assert told["engine"] == "a"
    assert told["hits"] == {"hbm": 640, "dram": 160, "store": 80, "compute": 120}
    assert told["predicted_seconds"] == decision.predicted_seconds
    a, b = told["targets"]
    assert (a["chosen"], a["hits"], a["prefill_tokens"]) == (True, {"hbm": 640, "dram": 160, "store": 80}, 200)
    assert b["predicted"]["compute_seconds"] == 1.0
    for words in (
        "'m' with 1,000 prompt tokens of session 'user-7' went to a, of 2: lowest predicted time to first token",
        "640 tokens in HBM, 160 tokens in its DRAM, 80 tokens in the store; 120 tokens are left to compute",
        f"predicted after {decision.predicted_seconds:.3f} s",
        "a had 1 requests with 300 prompt tokens in flight, 200 tokens of them to be computed first",
        "2 running and 1 waiting",
        "1.10 times the predicted time",
        "The next best: b 1.000 s (nothing held, 0.000 s of queue)",
    ):
        assert words in told["text"]


def test_what_is_told_is_json_and_does_not_need_scores():
    views = [EngineView("a", 0, 0)]
    told = explain(kv_aware(Holds()).pick(REQUEST, views), REQUEST, views)
    assert json.loads(json.dumps(told)) == told
    assert "predicted" not in told["targets"][0]


def test_a_miss_is_told_with_its_reason_in_words():
    views = [EngineView("a", 0, 0)]
    missed = kv_aware(Holds()).pick(REQUEST, views)
    assert "(not_held): no target holds its beginning" in explain(missed, REQUEST, views)["text"]
    unkeyed = RouteRequest("m", (1, 2), 50, unkeyed="tokenizer_missing")
    told = explain(kv_aware(Holds()).pick(unkeyed, views), unkeyed, views)
    assert told["miss_reason"] == "tokenizer_missing"
    assert "there is no tokenizer for its model" in told["text"]
    odd = RouteRequest("m", (1, 2), 50, unkeyed="some new reason")
    assert "(some new reason): some new reason" in explain(kv_aware(Holds()).pick(odd, views), odd, views)["text"]


def test_other_policies_are_explained_too():
    views = [EngineView("a", 0, 0), EngineView("b", 0, 0)]
    request = RouteRequest("m", (1, 2, 3), 192)
    prefix = Prefix()
    prefix.pick(request, views)
    told = explain(prefix.pick(request, views), request, views)
    assert "longest match" in told["text"]
    assert "matches 3 of 3 pieces" in told["text"]
    assert told["predicted_seconds"] is None
    assert "turn" in explain(RoundRobin().pick(request, views), request, views)["text"]


def test_a_refusal_is_told_as_one():
    told = explain(kv_aware(Holds()).pick(REQUEST, []), REQUEST, [])
    assert (told["engine"], told["refusal"]) == (None, "no_healthy_engine")
    assert "was refused (no_healthy_engine): no engine to choose from." in told["text"]
