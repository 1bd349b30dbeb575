"""Generated workloads have the sharing that their names promise, and depend on nothing but their seed."""

from dataclasses import replace

import numpy as np
import pytest

from kvhearth.errors import UserError
from kvhearth.planner.generate import RECIPES, Length, generate


@pytest.mark.parametrize("name", RECIPES)
def test_the_seed_decides(name: str) -> None:
    assert generate(name, 3) == generate(name, 3)
    assert generate(name, 3).users != generate(name, 4).users


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UserError, match=r"unknown workload 'x'.*multi-tenant"):
        generate("x")


def test_tenants_share_the_common_prompt_and_each_its_own() -> None:
    workload = generate("multi-tenant")
    shape = RECIPES["multi-tenant"][1]
    heads = {(user.tenant, user.turns[0].segments[:2]) for user in workload.users}
    assert len(heads) == shape.tenants == len({tenant for tenant, _ in heads})
    assert len({segments[0] for _, segments in heads}) == 1
    assert all(sum(s.tokens for s in segments) == 2048 for _, segments in heads)
    assert all(turn.continues for user in workload.users for turn in user.turns[1:])


def test_no_reuse_shares_nothing() -> None:
    seeds = [s.seed for user in generate("no-reuse").users for turn in user.turns for s in turn.segments]
    assert len(seeds) == len(set(seeds))


def test_rag_cites_popular_documents_more_often() -> None:
    shape = RECIPES["rag"][1]
    cited: dict[int, int] = {}
    for user in generate("rag").users:
        for turn in user.turns:
            documents = [s.seed for s in turn.segments if s.tokens == shape.document_tokens]
            assert len(documents) == len(set(documents)) == shape.documents_per_turn
            for seed in documents:
                cited[seed] = cited.get(seed, 0) + 1
    counts = sorted(cited.values(), reverse=True)
    assert counts[0] > 5 * np.median(counts)


def test_concurrency_rises_over_the_ramp() -> None:
    starts = [user.start_ns for user in generate("multi-tenant").users]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert 0 < starts[-1] < RECIPES["multi-tenant"][1].ramp_seconds * 1e9


def test_a_recipe_can_be_changed() -> None:
    recipe = replace(RECIPES["chat"][1], users=3, turns=2)
    assert generate("chat", recipe=recipe).requests == 6


def test_lengths_stay_in_range_and_near_their_median() -> None:
    rng = np.random.default_rng(0)
    drawn = [Length(100, 0.5, 50, 200).draw(rng) for _ in range(2000)]
    assert min(drawn) == 50
    assert max(drawn) == 200
    assert 90 < np.median(drawn) < 110
