"""Metrics of the router's tenants. Labels are names of the tenants file only, and so many at most."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

IN_FLIGHT = Metric(
    "kvhearth_router_tenant_requests_in_flight",
    Kind.GAUGE,
    "",
    "Requests that a tenant has under way, those that wait for an engine too.",
    ("tenant",),
)
REQUESTS = Metric(
    "kvhearth_router_tenant_requests",
    Kind.COUNTER,
    "",
    "Requests of a tenant, by outcome: admitted (of these turned_away by a full queue), or the limit that refused it.",
    ("tenant", "outcome"),
)
TOKENS = Metric(
    "kvhearth_router_tenant_tokens",
    Kind.COUNTER,
    "tokens",
    "Tokens of a tenant's admitted requests, by kind: prompt or completion.",
    ("tenant", "kind"),
)
FILE_FAILURES = Metric(
    "kvhearth_router_tenants_file_failures",
    Kind.COUNTER,
    "",
    "Times the changed tenants file could not be used; the tenants known before stay.",
)
