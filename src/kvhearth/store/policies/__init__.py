"""Eviction policies by name: who leaves the store first (`port`), judged by what is known of each chunk (`facts`)."""

from __future__ import annotations

from kvhearth.errors import UserError
from kvhearth.store.policies.facts import Facts
from kvhearth.store.policies.kv_aware import KvAware
from kvhearth.store.policies.lru import Lru
from kvhearth.store.policies.port import Policy
from kvhearth.store.policies.s3_fifo import S3Fifo

POLICY_NAMES = ("kv-aware", "lru", "s3-fifo")
DEFAULT_POLICY = "kv-aware"


def make_policy(name: str, facts: Facts, capacity_bytes: int) -> Policy:
    """The policy called ``name`` over ``facts``, for a store of ``capacity_bytes``.

    Raises:
        UserError: there is none of that name.
    """
    if name == "lru":
        return Lru(facts)
    if name == "s3-fifo":
        return S3Fifo(facts, capacity_bytes)
    if name == "kv-aware":
        return KvAware(facts)
    raise UserError(f"there is no policy {name!r}", where="policy", remedy=f"use one of {', '.join(POLICY_NAMES)}")
