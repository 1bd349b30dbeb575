"""Dear and cheap, by what putters tell and by the place in a chain."""

from __future__ import annotations

from kvhearth.store.policies.costs import ATTENTION_DOUBLES_AT, CHEAP, DEAR, USUAL, Costs
from kvhearth.store.policies.facts import Facts


def class_of(costs: Costs, facts: Facts, recompute_ns: int, nbytes: int = 1000, position: int = 0) -> int:
    facts.recompute_ns[0], facts.nbytes[0], facts.position[0] = recompute_ns, nbytes, position
    return costs.class_of(0)


def test_a_chunk_is_dear_or_cheap_against_the_mean_per_byte() -> None:
    facts = Facts(1)
    costs = Costs(facts)
    for _ in range(100):
        assert class_of(costs, facts, 5_000_000) == USUAL
    assert class_of(costs, facts, 50_000_000) == DEAR
    assert class_of(costs, facts, 50_000_000, nbytes=10_000) == USUAL
    assert class_of(costs, facts, 500_000) == CHEAP


def test_what_was_not_told_is_derived_from_the_place_in_the_chain() -> None:
    facts = Facts(1)
    costs = Costs(facts)
    assert class_of(costs, facts, 0, position=10 * ATTENTION_DOUBLES_AT) == USUAL  # there is nothing to compare with
    for _ in range(100):
        class_of(costs, facts, 5_000_000)
    assert class_of(costs, facts, 0) == USUAL
    assert class_of(costs, facts, 0, position=3 * ATTENTION_DOUBLES_AT) == DEAR


def test_the_mean_follows_what_putters_tell_now() -> None:
    facts = Facts(1)
    costs = Costs(facts)
    for recompute_ns in [1_000_000] * 5_000 + [9_000_000] * 5_000:
        last = class_of(costs, facts, recompute_ns)
    assert last == USUAL
