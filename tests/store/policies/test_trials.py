"""Patience is learned: floods of prompts that come once teach it, plain recency is left alone."""

from __future__ import annotations

import numpy as np

from kvhearth.store.policies.trials import LEAST_CAPACITY, LEAST_SHIFT, PATIENCES, Trials

HELD = 300 << LEAST_SHIFT


def loved_and_flood(trials: Trials, rounds: int) -> None:
    """200 chunks come again and again, between each two of their rounds 200 that come once."""
    for number in range(rounds):
        trials.used(list(range(200)))
        trials.used(list(range(1_000 + 200 * number, 1_200 + 200 * number)))


def test_a_flood_that_does_not_come_back_teaches_patience() -> None:
    trials = Trials()
    assert trials.resize(HELD) == LEAST_SHIFT
    assert trials.patience == PATIENCES[0] == 1
    loved_and_flood(trials, 40)
    assert trials.patience > 1


def test_where_recency_is_all_there_is_to_know_it_stays() -> None:
    trials = Trials()
    trials.resize(HELD)
    rng = np.random.default_rng(3)
    for number in range(400):  # a working set that drifts: what was used long ago is used no more
        trials.used((number + rng.integers(0, 150, 100)).tolist())
    assert trials.patience == 1


def test_too_small_a_sample_is_not_believed() -> None:
    trials = Trials()
    trials.resize((LEAST_CAPACITY - 1) << LEAST_SHIFT)
    for number in range(100):
        trials.used(list(range(40)))
        trials.used(list(range(1_000 + 400 * number, 1_400 + 400 * number)))
    assert trials.patience == 1


def test_a_larger_store_is_sampled_thinner() -> None:
    trials = Trials()
    assert [trials.resize(held) for held in (1, 10_000, 100_000, 1_000_000)] == [2, 2, 5, 8]
