"""A store over fake tiers, as both its parts are tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvhearth.store.dram.allocator import PAGE_BYTES
from kvhearth.store.dram.rules import Rules
from kvhearth.store.dram.table import Table
from kvhearth.store.server.tiered import Tiered

from ..fakes import FakeTier, eventually, is_empty

PAGES = 64
StartTiered = Callable[..., Tiered]


@pytest.fixture
def start() -> Iterator[StartTiered]:
    """Starts stores of 64 pages over fake tiers; at the end nothing of them may be left, in memory or below."""
    stores: list[tuple[Tiered, tuple[FakeTier, ...]]] = []

    def make(*tiers: FakeTier, pages: int = PAGES, max_items: int = 1000, **settings: Any) -> Tiered:
        table = Table(pages * PAGE_BYTES, max_items, rules=Rules(policy="lru"))
        store = Tiered(table, tiers, **{"read_seconds": 5.0, **settings})
        stores.append((store, tiers))
        store.start()
        return store

    yield make
    for store, tiers in stores:
        for tier in tiers:
            tier.open_gates()
        store.clear()
        store.close()
        eventually(lambda store=store: is_empty(store.table))
        assert all(tier.closed and not tier.values for tier in tiers)
        store.table.close()
