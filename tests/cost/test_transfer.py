"""Transfers: what a slower or faster link does to the operation-size curve, latency and concurrency.

The curve itself is held against its publication in test_published.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.cost import CostModel, Link, find_link
from kvhearth.cost.transfer import OP_FLOOR_SECONDS, transfer_ns

KIB = 1024
H100_LINK = Link("pcie", 64e9, host=True)
LINKS = [H100_LINK, Link("pcie", 32e9, host=True), Link("pcie", 450e9, host=True), find_link("nvme"), find_link("s3")]


def test_half_the_link_takes_twice_the_time() -> None:
    nbytes = 1 << 28
    fast, slow = (CostModel("Llama-3.1-8B", gpu).transfer_ns(nbytes, "pcie", 2 << 20) for gpu in ("H100", "A100-80"))
    assert slow == pytest.approx(2 * fast, rel=1e-6)


def test_a_very_fast_link_is_held_up_by_its_operations() -> None:
    model = CostModel("Llama-3.1-8B", "GH200-96")
    nbytes, op_bytes = 1 << 28, 32 * KIB
    assert model.transfer_ns(nbytes, "pcie", op_bytes) == pytest.approx(
        nbytes / op_bytes * OP_FLOOR_SECONDS * 1e9, rel=1e-6
    )
    assert nbytes / model.transfer_ns(nbytes, "pcie", 16 << 20) > 300


def test_small_operations_over_a_far_link_wait_for_its_latency() -> None:
    link = Link("far", bandwidth=10e9, latency_ns=50_000_000, ops_in_flight=4)
    one = transfer_ns(1 << 20, link, 1 << 20)
    assert one == pytest.approx(50_000_000 + (1 << 20) / 10, abs=1)
    # 101 operations, 4 at a time: 100/4 latencies after the first.
    assert transfer_ns(101 << 10, link, 1 << 10) == 50_000_000 + 25 * 50_000_000
    assert transfer_ns(101 << 10, replace(link, latency_ns=0), 1 << 10) == pytest.approx((101 << 10) / 10, abs=1)


def test_a_deployments_own_link_comes_before_the_catalog() -> None:
    own = Link("s3", bandwidth=1e9)
    model = CostModel("Llama-3.1-8B", "H100", links={"s3": own})
    assert model.transfer_ns(10**9, "s3", 10**6) == 10**9
    assert model.transfer_ns(10**9, own, 10**6) == 10**9


@given(
    link=st.sampled_from(LINKS),
    small=st.integers(0, 1 << 32),
    more=st.integers(0, 1 << 32),
    op_bytes=st.integers(1, 1 << 26),
)
def test_more_bytes_never_take_less_time(link: Link, small: int, more: int, op_bytes: int) -> None:
    less, longer = transfer_ns(small, link, op_bytes), transfer_ns(small + more, link, op_bytes)
    assert isinstance(less, int)
    assert less <= longer
    assert (less == 0) == (small == 0)


@given(
    link=st.sampled_from(LINKS),
    nbytes=st.integers(1, 1 << 32),
    op=st.integers(1, 1 << 26),
    more=st.integers(0, 1 << 26),
)
def test_larger_operations_never_take_more_time(link: Link, nbytes: int, op: int, more: int) -> None:
    assert transfer_ns(nbytes, link, op + more) <= transfer_ns(nbytes, link, op)
