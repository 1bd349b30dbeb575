"""Metrics of the router: what it forwarded, how long that took, what went wrong, what it believes of its engines."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

INTER_TOKEN_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
RATIO_BUCKETS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
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
PREFILL_TOKENS = Metric(
    "kvhearth_router_prefill_tokens",
    Kind.GAUGE,
    "tokens",
    "Prompt tokens sent to a target that it is believed to compute still.",
    ("engine",),
)
ENGINE_REQUESTS = Metric(
    "kvhearth_router_engine_requests",
    Kind.GAUGE,
    "",
    "Requests that a target has by its own last report, whoever sent them, by state (running or waiting).",
    ("engine", "state"),
)
LOAD_REPORT_FAILURES = Metric(
    "kvhearth_router_load_report_failures",
    Kind.COUNTER,
    "",
    "Times an engine's own load could not be read from its metrics page.",
    ("engine",),
)
FIRST_BYTE_SECONDS = Metric(
    "kvhearth_router_time_to_first_byte_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From a complete request to the first byte of the response body; for a stream the time to its first token.",
    ("model",),
)
INTER_TOKEN_SECONDS = Metric(
    "kvhearth_router_inter_token_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Mean time between the tokens of one streamed response (of its pieces, where the engine told no token count).",
    ("model",),
    INTER_TOKEN_BUCKETS_SECONDS,
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
PREDICTED_SECONDS = Metric(
    "kvhearth_router_predicted_time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Time to first token that kv-aware predicted, for the streams whose first token has come.",
    ("model",),
)
PREDICTION_RATIO = Metric(
    "kvhearth_router_observed_over_predicted_ratio",
    Kind.HISTOGRAM,
    "",
    "Observed over predicted time to first token of the same streams; 1 is a right prediction.",
    ("model",),
    RATIO_BUCKETS,
)
TTFT_FACTOR = Metric(
    "kvhearth_router_time_to_first_token_factor",
    Kind.GAUGE,
    "",
    "What predictions for a target are multiplied with, learned from what was observed there; 1 is none.",
    ("engine",),
)
PROMPT_TOKENS = Metric(
    "kvhearth_router_prompt_tokens",
    Kind.COUNTER,
    "tokens",
    "Prompt tokens routed by kv-aware, by where it expected their KV at the target: hbm, dram, store, or compute.",
    ("model", "source"),
)
MISSES = Metric(
    "kvhearth_router_misses",
    Kind.COUNTER,
    "",
    "Requests for which kv-aware expected no hit, by why.",
    ("reason",),
)
USAGE_TOKENS = Metric(
    "kvhearth_router_usage_tokens",
    Kind.COUNTER,
    "tokens",
    "Tokens by the engines' own account in responses that have one: prompt, cached (of the prompt), completion.",
    ("model", "kind"),
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
INDEX_BLOCKS = Metric(
    "kvhearth_router_index_blocks",
    Kind.GAUGE,
    "blocks",
    "What the KV index knows a target to hold, by tier: blocks in hbm, chunks in dram.",
    ("engine", "tier"),
)
INDEX_HOLDERS = Metric(
    "kvhearth_router_index_holders",
    Kind.GAUGE,
    "",
    "Pairs of a block (in a slower tier: of a chunk) and a place that holds it, over all of the KV index.",
)
INDEX_KEYS = Metric("kvhearth_router_index_keys", Kind.GAUGE, "", "Different blocks that the KV index knows of.")
INDEX_GUESSES = Metric(
    "kvhearth_router_index_guesses",
    Kind.GAUGE,
    "",
    "Blocks that targets are believed to hold soon, from what was sent there and is not told by events yet.",
)
INDEX_PARKED = Metric(
    "kvhearth_router_index_parked",
    Kind.GAUGE,
    "",
    "Blocks of events that cannot be placed until another event describes them or their parent.",
)
INDEX_BYTES = Metric("kvhearth_router_index_bytes", Kind.GAUGE, "bytes", "Memory of the KV index.")
INDEX_IGNORED = Metric(
    "kvhearth_router_index_ignored",
    Kind.COUNTER,
    "",
    "Blocks that the KV index was told of and did not take, or gave up, by reason.",
    ("reason",),
)
