"""Several tiers show in one scrape, each metric once, told apart by the tier's name."""

from __future__ import annotations

from collections.abc import Callable

from kvhearth.metrics import Registry, parse_exposition
from kvhearth.store.tiers.figures import Counts, families, merged
from kvhearth.store.tiers.files import FileError, Flaw
from kvhearth.store.tiers.guard import Reason, TierError


def raising(error: Exception) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


def test_two_tiers_share_one_page_with_each_metric_once() -> None:
    registry = Registry()
    disk, objects = Counts(), Counts()
    assert disk.read_by(lambda: 100)
    assert not disk.read_by(raising(FileError(Flaw.CHECKSUM)))
    assert not disk.read_by(raising(TierError(Reason.VANISHED, sick=False)))
    assert objects.written_by(lambda: 7)
    assert not objects.written_by(raising(TierError(Reason.TIMEOUT)))
    objects.evicted(3)

    def read() -> list[object]:
        shown = []
        for name, counts, is_down in (("disk", disk, False), ("object", objects, True)):
            stats = counts.stats(
                items=1, value_bytes=2, stored_bytes=3, capacity_bytes=4, is_down=is_down, ready=not is_down
            )
            shown += families(name, stats, counts, writes_down=False)
        return merged(shown)

    registry.collect_from(read)  # type: ignore[arg-type]
    text = registry.expose().decode()
    page = parse_exposition(text)
    assert text.count("# TYPE kvhearth_store_tier_up gauge") == 1
    assert page["kvhearth_store_tier_up"] == {
        (("operation", operation), ("tier", tier)): float(tier == "disk")
        for operation in ("read", "write")
        for tier in ("disk", "object")
    }
    assert page["kvhearth_store_tier_reads_total"] == {(("tier", "disk"),): 1.0, (("tier", "object"),): 0.0}
    assert page["kvhearth_store_tier_read_bytes_total"][(("tier", "disk"),)] == 100.0
    assert page["kvhearth_store_tier_read_seconds_total"][(("tier", "disk"),)] > 0
    assert page["kvhearth_store_tier_written_bytes_total"][(("tier", "object"),)] == 7.0
    assert page["kvhearth_store_tier_misses_total"] == {
        (("reason", reason), ("tier", "disk")): 1.0 for reason in ("checksum", "vanished")
    }
    assert page["kvhearth_store_tier_refused_writes_total"] == {(("reason", "timeout"), ("tier", "object")): 1.0}
    assert page["kvhearth_store_tier_evictions_total"][(("tier", "object"),)] == 3.0
