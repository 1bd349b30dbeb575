"""Metrics of who may use the store: logins, and files of which an older version is in force."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

LOGINS = Metric(
    "kvhearth_store_logins",
    Kind.COUNTER,
    "",
    "Attempts to log in by outcome: ok, wrong (name or password), busy (too many attempts at once).",
    ("outcome",),
)
USERS_STALE = Metric(
    "kvhearth_store_users_stale",
    Kind.GAUGE,
    "",
    "1 while the users file as it is now cannot be used and the last good one stays in force.",
)
TLS_STALE = Metric(
    "kvhearth_store_tls_stale",
    Kind.GAUGE,
    "",
    "1 while the certificate files as they are now cannot be used and the last good ones stay in force.",
)
