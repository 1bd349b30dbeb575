"""Modelled transfers queue a link and direction, and never across them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.cost import CostModel
from kvhearth.engine.links import ModelledLinks, modelled_links
from kvhearth.engine.ports import Job, JobKind
from kvhearth.errors import UserError

LATENCY_NS = 50
JOBS = st.lists(st.tuples(st.sampled_from(JobKind), st.integers(0, 1000), st.integers(0, 200)), max_size=30)


def links() -> ModelledLinks:
    return ModelledLinks(lambda n: 2 * n, lambda n: 3 * n, lambda n: LATENCY_NS + n, LATENCY_NS)


def job(kind: JobKind, nbytes: int) -> Job:
    return Job(0, kind, (1,), nbytes)


@given(JOBS)
def test_each_kind_of_transfer_is_a_queue_of_its_own(jobs: list[tuple[JobKind, int, int]]) -> None:
    occupied = {JobKind.LOAD: (2, 0), JobKind.SAVE: (3, 0), JobKind.FETCH: (1, 50), JobKind.PUT: (1, 50)}
    made, now, free = links(), 0, dict.fromkeys(JobKind, 0)
    for kind, nbytes, later in jobs:
        now += later
        rate, latency = occupied[kind]
        free[kind] = max(now, free[kind]) + rate * nbytes
        assert made.done_ns(now, job(kind, nbytes)) == free[kind] + latency


def test_a_lookup_takes_the_latency_of_the_store_whatever_is_queued() -> None:
    made = links()
    made.done_ns(0, job(JobKind.FETCH, 10_000))
    assert made.lookup_ns(7) == 7 + LATENCY_NS


def test_an_idle_link_takes_what_the_cost_model_says() -> None:
    cost = CostModel("llama-3.1-8b", "h100-sxm")
    chunk = cost.kv_bytes(64)
    made = modelled_links(cost, "ethernet-100g", chunk)
    nbytes = 100 * chunk
    assert made.done_ns(5, job(JobKind.LOAD, nbytes)) == 5 + cost.dram_load_ns(nbytes)
    assert made.done_ns(5, job(JobKind.SAVE, nbytes)) == 5 + cost.dram_save_ns(nbytes)
    assert made.done_ns(5, job(JobKind.FETCH, nbytes)) == 5 + cost.transfer_ns(nbytes, "ethernet-100g", chunk)


def test_an_unknown_store_link_is_named() -> None:
    with pytest.raises(UserError, match="carrier-pigeon"):
        modelled_links(CostModel("llama-3.1-8b", "h100-sxm"), "carrier-pigeon", 1)
