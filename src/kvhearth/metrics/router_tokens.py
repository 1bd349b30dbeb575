"""Metrics of the router's token ids: who made them, and whether ours are the engines'."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

TOKENIZED = Metric(
    "kvhearth_router_tokenized",
    Kind.COUNTER,
    "",
    "Prompts by who made their token ids: given by the client, local tokenizer, engine, or none.",
    ("by",),
)
PARITY = Metric(
    "kvhearth_router_token_parity",
    Kind.GAUGE,
    "",
    "1 where the local tokenizer makes the ids that the engine makes, by shape of request; else the engine is asked.",
    ("engine", "shape"),
)
