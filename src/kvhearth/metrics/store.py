"""The store's metrics: the server's side and, with ``client`` in the name, the side of whoever calls it."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

COMMANDS = Metric(
    "kvhearth_store_commands",
    Kind.COUNTER,
    "",
    "Commands answered, by name and status (ok, error).",
    ("command", "status"),
)
RECEIVED = Metric("kvhearth_store_received_bytes", Kind.COUNTER, "bytes", "Bytes received from clients.")
SENT = Metric("kvhearth_store_sent_bytes", Kind.COUNTER, "bytes", "Bytes sent to clients.")
HITS = Metric("kvhearth_store_hits", Kind.COUNTER, "", "Keys of GET and MGET that were present.")
MISSES = Metric("kvhearth_store_misses", Kind.COUNTER, "", "Keys of GET and MGET that were absent.")
ITEMS = Metric("kvhearth_store_items", Kind.GAUGE, "", "Values held.")
VALUES = Metric("kvhearth_store_value_bytes", Kind.GAUGE, "bytes", "Bytes of the values held.")
USED = Metric("kvhearth_store_used_bytes", Kind.GAUGE, "bytes", "Pool memory in use, in whole pages, uploads included.")
CAPACITY = Metric("kvhearth_store_capacity_bytes", Kind.GAUGE, "bytes", "Pool memory in all.")
PINNED = Metric(
    "kvhearth_store_pinned_bytes", Kind.GAUGE, "bytes", "Pool memory of values kept from eviction, in whole pages."
)
LENT = Metric(
    "kvhearth_store_lent_bytes",
    Kind.GAUGE,
    "bytes",
    "Bytes that clients of shared memory hold: values that they copy out and memory that they copy into.",
)
GROUP_BYTES = Metric(
    "kvhearth_store_group_bytes",
    Kind.GAUGE,
    "bytes",
    "Bytes of the values held by sharing group (hexadecimal; zeros for none, other beyond 64 groups).",
    ("group",),
)
GROUP_VALUES = Metric("kvhearth_store_group_values", Kind.GAUGE, "", "Values held by sharing group.", ("group",))
NAMESPACE_BYTES = Metric(
    "kvhearth_store_namespace_bytes",
    Kind.GAUGE,
    "bytes",
    "Bytes of the values held in DRAM by namespace (the 64 largest, the rest together as other).",
    ("namespace",),
)
NAMESPACE_VALUES = Metric(
    "kvhearth_store_namespace_values", Kind.GAUGE, "", "Values held in DRAM by namespace.", ("namespace",)
)
EXPIRATIONS = Metric("kvhearth_store_expirations", Kind.COUNTER, "", "Values dropped because their time was up.")
EVENT_FOLLOWERS = Metric("kvhearth_store_event_followers", Kind.GAUGE, "", "Connections that follow events.")
SAVES = Metric(
    "kvhearth_store_saves",
    Kind.COUNTER,
    "",
    "Values on their way to a lower tier, by outcome: saved, refused by the tier, skipped (queue full, or gone).",
    ("tier", "outcome"),
)
SAVE_QUEUE = Metric(
    "kvhearth_store_save_queue_bytes", Kind.GAUGE, "bytes", "Bytes of values waiting for a lower tier.", ("tier",)
)
LIFTS = Metric(
    "kvhearth_store_lifts",
    Kind.COUNTER,
    "",
    "Values brought up from a lower tier, by outcome: lifted, missed, no_room in DRAM, not_kept (deleted meanwhile).",
    ("tier", "outcome"),
)
EVICTIONS = Metric("kvhearth_store_evictions", Kind.COUNTER, "", "Values dropped to make room.")
REFUSED_UPLOADS = Metric(
    "kvhearth_store_refused_uploads",
    Kind.COUNTER,
    "",
    "SETs refused because memory was taken by uploads and sends in flight.",
)
CONNECTIONS = Metric("kvhearth_store_connections", Kind.GAUGE, "", "Clients connected.")
CONNECTIONS_OPENED = Metric("kvhearth_store_connections_opened", Kind.COUNTER, "", "Clients accepted.")
CONNECTIONS_REFUSED = Metric(
    "kvhearth_store_connections_refused", Kind.COUNTER, "", "Clients turned away because there were too many."
)
CONNECTIONS_CUT = Metric(
    "kvhearth_store_connections_cut", Kind.COUNTER, "", "Connections closed by the server, by reason.", ("reason",)
)

CLIENT_CALLS = Metric(
    "kvhearth_store_client_calls",
    Kind.COUNTER,
    "",
    "Keys and rows asked of the store by operation and outcome; outcomes other than ok are misses.",
    ("operation", "outcome"),
)
CLIENT_BYTES = Metric(
    "kvhearth_store_client_bytes",
    Kind.COUNTER,
    "bytes",
    "Bytes of rows that came (get) and went (put), by tcp, unix socket or shared memory.",
    ("transport", "operation"),
)
