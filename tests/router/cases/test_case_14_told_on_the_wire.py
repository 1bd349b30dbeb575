"""Event streams that no emulated engine sends: orphans, copies in two tiers, chunks of several blocks, and silence."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvhearth.router.config import EventSource, KvSettings
from kvhearth.router.feeds import engine as feed

from ..feeds.conftest import BLOCK, Publisher, removed, stored


class Told:
    """An engine whose events a test writes, behind a kv-aware router."""

    def __init__(self, lab) -> None:
        self.lab = lab
        self.publisher: Publisher = lab.engines_loop.run(self._publisher())
        source = EventSource(self.publisher.events, self.publisher.replay)
        settings = KvSettings(events={"e0": source}, block_tokens=BLOCK)
        self.router = lab.router(lab.engine(), policy="kv-aware", kv=settings)
        self.wire = self.router.wire()

    @staticmethod
    async def _publisher() -> Publisher:
        return Publisher()

    def publish(self, *events: dict) -> None:
        """A batch goes out, and the router has taken it. It goes out again until then, for a subscriber may be late."""
        number = self.lab.engines_loop.run(self.publisher.publish(*events))

        def taken() -> bool:
            if self.metric("feed_batches_total", source="e0") == number + 1:
                return True
            self.lab.engines_loop.run(self.publisher.again(number))
            return False

        self.lab.until(taken, "the batch is taken")

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metric(f"kvhearth_router_{name}", **labels)

    def blocks(self, tier: str) -> float:
        return self.metric("index_blocks", tier=tier)

    def hit(self, blocks: int, *, first: int = 0) -> str:
        """What a request is expected to find whose prompt is so many blocks and a token of its own. What a request asks
        for counts as held for a while, so a prompt can be asked about once only."""
        prompt = [*range(first, first + BLOCK * blocks), 99_999]
        self.wire.post(json.dumps({"model": "m", "prompt": prompt}).encode())
        status, lines, _ = self.wire.response()
        assert status == 200
        return dict(lines)["x-kvhearth-hit"]

    def close(self) -> None:
        async def close() -> None:
            self.publisher.close()

        self.lab.engines_loop.run(close())


@pytest.fixture
def told(lab) -> Iterator[Told]:
    made = Told(lab)
    yield made
    made.close()


def test_blocks_of_an_unknown_parent_wait_and_count_once_it_is_told(told):
    told.publish(stored([3, 4], 2, first=2 * BLOCK))
    assert (told.metric("index_parked"), told.blocks("hbm")) == (2, 0)
    told.publish(stored([1, 2]))
    assert (told.metric("index_parked"), told.blocks("hbm")) == (0, 4)
    assert told.hit(4) == "tokens=16, hbm=16, dram=0, store=0"


def test_an_orphan_that_is_removed_before_its_parent_comes_never_counts(told):
    told.publish(stored([3, 4], 2, first=2 * BLOCK))
    told.publish(removed([3, 4]))
    told.publish(stored([1, 2]))
    assert told.hit(4) == "tokens=8, hbm=8, dram=0, store=0"


def test_what_leaves_hbm_is_still_there_in_dram(told):
    told.publish(stored([1, 2, 3, 4]))
    for number in range(1, 5):
        told.publish(stored([number], token_ids=[], block_size=0, medium="CPU", parent_block_hash=None))
    assert (told.blocks("hbm"), told.blocks("dram")) == (4, 4)
    told.publish(removed([1, 2, 3, 4]))
    assert (told.blocks("hbm"), told.blocks("dram")) == (0, 4)
    assert told.hit(4) == "tokens=16, hbm=0, dram=16, store=0"


def test_what_leaves_dram_is_still_there_in_hbm(told):
    told.publish(stored([1, 2]))
    told.publish(stored([1], medium="CPU"), stored([2], 1, first=BLOCK, medium="CPU"))
    told.publish(removed([1, 2], "CPU"))
    assert told.hit(2) == "tokens=8, hbm=8, dram=0, store=0"


@pytest.mark.parametrize(("blocks", "dram"), [(3, 0), (4, 16), (7, 16), (8, 32)])
def test_a_chunk_of_four_blocks_in_dram_counts_whole_or_not_at_all(told, blocks, dram):
    told.publish(stored([1, 2, 3, 4, 5, 6, 7, 8]))
    told.publish(stored([1, 2, 3, 4], medium="CPU"), stored([5, 6, 7, 8], 4, first=4 * BLOCK, medium="CPU"))
    told.publish(removed([1, 2, 3, 4, 5, 6, 7, 8]))
    assert told.hit(blocks) == f"tokens={dram}, hbm=0, dram={dram}, store=0"


def test_a_medium_that_nobody_knows_is_worth_nothing_and_is_counted(told):
    told.publish(stored([1, 2], medium="TAPE"))
    assert told.metric("feed_ignored_total", reason="unknown_medium") == 1
    assert told.hit(2).startswith("tokens=0")


def test_a_cleared_cache_is_empty_in_every_tier_of_the_engine(told):
    told.publish(stored([1, 2]))
    told.publish(stored([3, 4], 2, first=2 * BLOCK), stored([77], 76))
    told.publish({"type": "AllBlocksCleared"})
    assert (told.blocks("hbm"), told.metric("index_parked")) == (0, 0)
    assert told.hit(4).startswith("tokens=0")


def test_an_engine_that_gets_requests_and_tells_nothing_is_alerted_to_until_it_tells(lab, monkeypatch, caplog):
    monkeypatch.setattr(feed, "SILENT_SECONDS", 0.2)
    told = Told(lab)
    try:
        told.hit(4, first=1000)
        lab.until(lambda: told.metric("feed_silent", source="e0") == 1, "the alert")
        assert "e0 gets requests and publishes no KV events" in caplog.text
        told.hit(4, first=2000)
        assert told.metric("misses_total", reason="silent") == 1
        told.publish(stored([1, 2, 3, 4]))
        lab.until(lambda: told.metric("feed_silent", source="e0") == 0, "the all-clear")
        assert told.hit(4) == "tokens=16, hbm=16, dram=0, store=0"
    finally:
        told.close()
