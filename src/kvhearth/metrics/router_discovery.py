"""Metrics of discovery: who tells the router of how many engines, and how long ago."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

MEMBERS = Metric(
    "kvhearth_router_discovered_engines",
    Kind.GAUGE,
    "",
    "Engines told of, by source: named (in the configuration), file, dns or kubernetes.",
    ("source",),
)
FAILURES = Metric(
    "kvhearth_router_discovery_failures",
    Kind.COUNTER,
    "",
    "Times a source of engines could not be read; the engines known before stay.",
    ("source", "reason"),
)
AGE_SECONDS = Metric(
    "kvhearth_router_discovery_age_seconds",
    Kind.GAUGE,
    "seconds",
    "Since a source of engines was last read well.",
    ("source",),
)
