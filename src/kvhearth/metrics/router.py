"""Metrics of the router: what it forwarded, how long that took, what went wrong, what it believes of its engines."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

DECISION_BUCKETS_SECONDS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2)

REQUESTS = Metric(
    "kvhearth_router_requests",
    Kind.COUNTER,
    "",
    "Requests answered, by model, engine that answered (empty: the router itself), status class and policy.",
    ("model", "engine", "status_class", "policy"),
)
REQUESTS_IN_FLIGHT = Metric(
    "kvhearth_router_requests_in_flight",
    Kind.GAUGE,
    "",
    "Requests that an engine is working on for this router.",
    ("engine",),
)
TOKENS_IN_FLIGHT = Metric(
    "kvhearth_router_in_flight_tokens",
    Kind.GAUGE,
    "tokens",
    "Estimated prompt tokens of the requests in flight: the load that policies balance.",
    ("engine",),
)
FIRST_BYTE_SECONDS = Metric(
    "kvhearth_router_time_to_first_byte_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From a complete request to the first byte of the response body; for a stream the time to its first token.",
    ("model",),
)
DURATION_SECONDS = Metric(
    "kvhearth_router_request_duration_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From a complete request to the last byte of its response.",
    ("model",),
)
DECISION_SECONDS = Metric(
    "kvhearth_router_decision_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Time to hash a prompt and pick an engine.",
    ("policy",),
    DECISION_BUCKETS_SECONDS,
)
PREFIX_PIECES = Metric(
    "kvhearth_router_prefix_pieces",
    Kind.COUNTER,
    "",
    "Pieces of prompt text routed, by whether the policy believed the chosen engine to hold their KV (hit or miss).",
    ("result",),
)
UPSTREAM_FAILURES = Metric(
    "kvhearth_router_upstream_failures",
    Kind.COUNTER,
    "",
    "Attempts on an engine that failed, by reason.",
    ("engine", "reason"),
)
RETRIES = Metric(
    "kvhearth_router_retries",
    Kind.COUNTER,
    "",
    "Requests sent again before any byte reached the client: stale_connection (same engine) or other_engine.",
    ("kind",),
)
CLIENT_DISCONNECTS = Metric(
    "kvhearth_router_client_disconnects",
    Kind.COUNTER,
    "",
    "Clients that left before their response was complete.",
)
REFUSALS = Metric(
    "kvhearth_router_refusals",
    Kind.COUNTER,
    "",
    "Requests that the router itself answered with an error, by code.",
    ("code",),
)
ENGINES = Metric(
    "kvhearth_router_engines",
    Kind.GAUGE,
    "",
    "Engines known to the router, by state (healthy or down).",
    ("state",),
)
CONNECTIONS = Metric(
    "kvhearth_router_client_connections",
    Kind.GAUGE,
    "",
    "Open client connections.",
)
EXCHANGES = Metric(
    "kvhearth_router_exchanges",
    Kind.GAUGE,
    "",
    "Entries in the router's table of requests in progress; 0 when idle.",
)
BUFFERED_BYTES = Metric(
    "kvhearth_router_buffered_bytes",
    Kind.GAUGE,
    "bytes",
    "Request bodies held in memory; 0 when idle.",
)
PREFIX_INDEX_PIECES = Metric(
    "kvhearth_router_prefix_index_pieces",
    Kind.GAUGE,
    "pieces",
    "Pieces in the prefix policy's index; 0 under other policies.",
)
