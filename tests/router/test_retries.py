"""Retries are a bounded share of requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.router.config import Resilience
from kvhearth.router.retries import RetryBudget


@given(st.lists(st.booleans(), max_size=500), st.integers(0, 20), st.sampled_from([0.0, 0.25, 1.0]))
def test_retries_never_exceed_the_burst_and_their_share_of_the_requests(happenings, burst, share):
    budget = RetryBudget(Resilience(retry_share=share, retry_burst=burst))
    requests = retries = 0
    for is_request in happenings:
        if is_request:
            budget.request()
            requests += 1
        else:
            retries += budget.take()
        assert retries <= burst + share * requests
        assert 0 <= budget.saved <= burst


def test_it_is_used_up_and_comes_back_with_requests():
    budget = RetryBudget(Resilience(retry_share=0.5, retry_burst=1))
    assert budget.take()
    assert not budget.take()
    budget.request()
    assert not budget.take()
    budget.request()
    assert budget.take()
