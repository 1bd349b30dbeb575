"""Settings reach the parts that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhearth.store.server.assemble import store_of
from kvhearth.store.server.config import StoreConfig


@pytest.mark.parametrize(("object_timeout_seconds", "longest"), [(0.5, 1.0), (20.0, 20.0)])
def test_a_read_may_take_as_long_as_an_object_may(
    tmp_path: Path, object_timeout_seconds: float, longest: float
) -> None:
    config = StoreConfig(
        capacity_bytes=2**20, object_url=f"file://{tmp_path}", object_timeout_seconds=object_timeout_seconds
    )
    store = store_of(config, None)
    assert store._read_seconds == longest
    store.close()
    store.table.close()
