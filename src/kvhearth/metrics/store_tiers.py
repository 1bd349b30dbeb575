"""Metrics of the store's tiers below its DRAM. ``tier`` is ``disk`` or ``object``."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

UP = Metric(
    "kvhearth_store_tier_up",
    Kind.GAUGE,
    "",
    "1 while the tier is used for this operation (read, write), 0 while it is skipped because it failed.",
    ("tier", "operation"),
)
READY = Metric(
    "kvhearth_store_tier_ready", Kind.GAUGE, "", "1 once everything that the tier holds has been found.", ("tier",)
)
ITEMS = Metric("kvhearth_store_tier_items", Kind.GAUGE, "", "Values held.", ("tier",))
VALUES = Metric("kvhearth_store_tier_value_bytes", Kind.GAUGE, "bytes", "Bytes of the values held.", ("tier",))
STORED = Metric(
    "kvhearth_store_tier_stored_bytes",
    Kind.GAUGE,
    "bytes",
    "Bytes of the files or objects of the values held.",
    ("tier",),
)
CAPACITY = Metric(
    "kvhearth_store_tier_capacity_bytes", Kind.GAUGE, "bytes", "Bound of the stored bytes; 0 for none.", ("tier",)
)
READS = Metric("kvhearth_store_tier_reads", Kind.COUNTER, "", "Values read and found right.", ("tier",))
READ_BYTES = Metric("kvhearth_store_tier_read_bytes", Kind.COUNTER, "bytes", "Bytes of values read.", ("tier",))
READ_SECONDS = Metric(
    "kvhearth_store_tier_read_seconds", Kind.COUNTER, "seconds", "Time that reads took, summed over threads.", ("tier",)
)
WRITES = Metric("kvhearth_store_tier_writes", Kind.COUNTER, "", "Values written.", ("tier",))
WRITTEN_BYTES = Metric(
    "kvhearth_store_tier_written_bytes", Kind.COUNTER, "bytes", "Bytes of values written.", ("tier",)
)
WRITE_SECONDS = Metric(
    "kvhearth_store_tier_write_seconds",
    Kind.COUNTER,
    "seconds",
    "Time that writes took, summed over threads.",
    ("tier",),
)
EVICTIONS = Metric("kvhearth_store_tier_evictions", Kind.COUNTER, "", "Values dropped to make room.", ("tier",))
MISSES = Metric(
    "kvhearth_store_tier_misses",
    Kind.COUNTER,
    "",
    "Reads that gave nothing, by reason (absent, vanished, checksum, truncated, other_key, version, resized, timeout, "
    "busy, down, io, denied, missing, locked).",
    ("tier", "reason"),
)
REFUSED = Metric(
    "kvhearth_store_tier_refused_writes",
    Kind.COUNTER,
    "",
    "Writes that were not done, by reason (too_large, no_room, no_space, timeout, busy, down, io, "
    "denied, missing, locked).",
    ("tier", "reason"),
)
