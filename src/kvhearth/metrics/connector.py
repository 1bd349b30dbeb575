"""The connector's metrics; they appear on the engine's own ``/metrics`` page with vLLM's labels before ours."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

SCHEDULER_SECONDS = Metric(
    "kvhearth_connector_scheduler_seconds",
    Kind.COUNTER,
    "seconds",
    "Time the scheduler's thread spent in the connector, upstream's part included.",
)
LAZY_CHUNKS = Metric(
    "kvhearth_connector_lazy_chunks",
    Kind.COUNTER,
    "",
    "Chunks that lazy admission saved, by when: ahead of eviction, or at it (the step waits for the copy).",
    ("when",),
)
LOOKUPS = Metric(
    "kvhearth_connector_lookups",
    Kind.COUNTER,
    "",
    "Chunks asked of the store by outcome: hit, miss, timeout (no answer before the deadline), full (queue was full).",
    ("outcome",),
)
AWAITED = Metric(
    "kvhearth_connector_awaited",
    Kind.COUNTER,
    "",
    "Requests that waited for chunks promised by a prefill engine, by outcome: kept or late.",
    ("outcome",),
)
GET_BYTES = Metric("kvhearth_connector_get_bytes", Kind.COUNTER, "bytes", "KV bytes from the store into DRAM.")
GET_FAILURES = Metric(
    "kvhearth_connector_get_failures",
    Kind.COUNTER,
    "",
    "Chunks promised by a lookup that did not come; the engine computes them again.",
    ("reason",),
)
PUT_BYTES = Metric("kvhearth_connector_put_bytes", Kind.COUNTER, "bytes", "KV bytes from DRAM into the store.")
PUT_CHUNKS = Metric(
    "kvhearth_connector_put_chunks",
    Kind.COUNTER,
    "",
    "Chunks offered to the store by outcome: stored, present (it had them), second_sight (seen once so far), dropped "
    "(back pressure), orphan (their predecessor is not there), stale (of weights before a reset), failed.",
    ("outcome",),
)
PUT_QUEUE = Metric("kvhearth_connector_put_queue_bytes", Kind.GAUGE, "bytes", "KV bytes that wait to be put.")
STORE_UP = Metric("kvhearth_connector_store_up", Kind.GAUGE, "", "1 while the store answers, else 0.")
MISMATCH = Metric(
    "kvhearth_connector_pool_mismatch",
    Kind.GAUGE,
    "",
    "1 for each field of the namespace in which this engine differs from its pool, so that they share nothing.",
    ("field",),
)
EPOCHS = Metric(
    "kvhearth_connector_epochs", Kind.COUNTER, "", "Times the weights epoch was rotated, by reset or weight update."
)
