"""Metrics of the router's feeds: what engines and the store tell of the KV they hold, and what got lost on the way."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

BATCHES = Metric(
    "kvhearth_router_feed_batches", Kind.COUNTER, "", "Messages of KV events taken, by source.", ("source",)
)
LAG_SECONDS = Metric(
    "kvhearth_router_feed_lag_seconds",
    Kind.GAUGE,
    "seconds",
    "From an engine's clock to ours, of its last batch of KV events.",
    ("source",),
)
SILENT = Metric(
    "kvhearth_router_feed_silent",
    Kind.GAUGE,
    "",
    "1 where requests have gone for 10 s and no KV event has come: events are configured in one place only.",
    ("source",),
)
RESTARTS = Metric(
    "kvhearth_router_feed_restarts", Kind.COUNTER, "", "New starts of an engine seen in its KV events.", ("source",)
)
DUPLICATES = Metric(
    "kvhearth_router_feed_duplicates", Kind.COUNTER, "", "Batches that came twice, or late.", ("source",)
)
IGNORED = Metric(
    "kvhearth_router_feed_ignored",
    Kind.COUNTER,
    "",
    "Events that were of no use, by why: unreadable, unknown_event, unknown_medium, remote.",
    ("source", "reason"),
)
HEALED = Metric(
    "kvhearth_router_feed_healed",
    Kind.COUNTER,
    "",
    "Holes in what was heard, by what closed them: replay, snapshot, or relearn (all forgotten, learnt anew).",
    ("source", "by"),
)
FAILURES = Metric(
    "kvhearth_router_feed_failures",
    Kind.COUNTER,
    "",
    "Attempts to heal that failed: replay or snapshot.",
    ("source", "attempt"),
)
STORE_CONNECTED = Metric(
    "kvhearth_router_store_feed_connected", Kind.GAUGE, "", "1 while a store node's events are followed.", ("address",)
)
STORE_CHUNKS = Metric(
    "kvhearth_router_store_chunks", Kind.GAUGE, "", "Different chunks that the followed store nodes hold."
)
