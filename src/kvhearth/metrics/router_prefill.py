"""Metrics of prefill and decode apart: what became of prompts that an engine of role prefill was to compute."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

PREFILLS = Metric(
    "kvhearth_router_prefills",
    Kind.COUNTER,
    "",
    "Requests where prefill and decode have engines of their own, by what became of the prefill: done; short or shape "
    "(left to the decode engine); full, refused, lost or late (the same, for want of a prefill engine that did it).",
    ("outcome",),
)
PREFILL_SECONDS = Metric(
    "kvhearth_router_prefill_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Time that a prefill engine took for a prompt, by model.",
    ("model",),
)
