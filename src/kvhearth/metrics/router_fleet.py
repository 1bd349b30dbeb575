"""Metrics of the router's fleet: engines by state, breakers, what engines may have at once, the queue, retries left."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

ENGINES = Metric(
    "kvhearth_router_engines",
    Kind.GAUGE,
    "",
    "Engines known to the router, by state: healthy, draining, broken (breaker open), trial (half open) or down; "
    "leaving are those that are no members any more and end what they have.",
    ("state",),
)
BREAKER_OPENED = Metric(
    "kvhearth_router_breaker_opened",
    Kind.COUNTER,
    "",
    "Times that an engine's breaker has opened.",
    ("engine",),
)
ENGINE_CAPACITY = Metric(
    "kvhearth_router_engine_capacity",
    Kind.GAUGE,
    "",
    "Requests that an engine may have at once, by its limit, its own reports, its age and its breaker.",
    ("engine",),
)
RETRIES_SAVED = Metric(
    "kvhearth_router_retries_saved",
    Kind.GAUGE,
    "",
    "Retries that may be made at this moment; at 0 failures are answered as they are.",
)
QUEUED_REQUESTS = Metric(
    "kvhearth_router_queued_requests",
    Kind.GAUGE,
    "",
    "Requests that wait in the router for an engine with room.",
    ("model",),
)
QUEUE_OUTCOMES = Metric(
    "kvhearth_router_queue_outcomes",
    Kind.COUNTER,
    "",
    "Requests that were to wait, by what came of it: sent, expired, left (the client), full, tenant_full or displaced.",
    ("outcome",),
)
QUEUE_SECONDS = Metric(
    "kvhearth_router_queue_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From a complete request to its being sent, for those that had to wait for an engine.",
    ("model",),
)
CONFIG_GENERATION = Metric(
    "kvhearth_router_config_generation",
    Kind.GAUGE,
    "",
    "Configurations that have been in force, this one included.",
)
CONFIG_FAILURES = Metric(
    "kvhearth_router_config_failures",
    Kind.COUNTER,
    "",
    "Times a changed configuration could not be used; the one before stays in force.",
)
