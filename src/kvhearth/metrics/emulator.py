"""What an emulated engine says of itself beside vLLM's metrics: its clock, its lag, its tiers, its store traffic."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

_ENGINE = ("engine",)


def _counter(what: str, unit: str, text: str, *more_labels: str) -> Metric:
    return Metric(f"kvhearth_emulator_{what}", Kind.COUNTER, unit, text, _ENGINE + more_labels)


def _gauge(what: str, unit: str, text: str) -> Metric:
    return Metric(f"kvhearth_emulator_{what}", Kind.GAUGE, unit, text, _ENGINE)


TIME_SCALE = _gauge("time_scale", "", "Emulated seconds that pass in one second of the wall clock.")
NOW = _gauge("now_seconds", "seconds", "The emulated clock: emulated seconds since the engine started.")
STEPS = _counter("steps", "", "Engine steps run.")

LAG = _counter(
    "lag_seconds", "seconds", "Sum over steps of how late their tokens were handed out, in emulated seconds."
)
LAG_MAX = _gauge("lag_max_seconds", "seconds", "The largest lag of a step so far, in emulated seconds.")
LAG_P99 = _gauge("lag_p99_seconds", "seconds", "99th percentile of lag over the latest steps, in emulated seconds.")
STORE_LAG = _counter(
    "store_lag_seconds", "seconds", "How much later than modelled the store really answered, in emulated seconds."
)

PROMPT_TOKENS = _counter(
    "prompt_tokens", "tokens", "Prompt tokens by where their KV came from: hbm, dram, store, compute.", "source"
)
REPREFILL = _counter("reprefill_tokens", "tokens", "Tokens computed again after a preemption.")
REPREFILLS_AVOIDED = _counter(
    "reprefills_avoided", "", "Admissions and resumptions that took tokens from DRAM or the store."
)
REPREFILL_AVOIDED = _counter("reprefill_avoided_tokens", "tokens", "Tokens that those did not compute.")
REQUESTS_ABORTED = _counter("requests_aborted", "", "Requests dropped because their client went away.")
MOVED = _counter("transfer_bytes", "bytes", "Real, unscaled KV bytes moved, by kind: load, save, fetch, put.", "kind")
FAILED_LOADS = _counter("failed_loads", "", "Loads that brought fewer chunks than promised.")

STORE_UP = _gauge("store_up", "", "1 while the store answers, 0 while it does not; absent without a store.")
STORE_BYTES_SCALE = _gauge("store_bytes_scale", "", "Bytes of modelled KV that one byte sent to the store stands for.")
STORE_PAYLOAD = _counter(
    "store_payload_bytes", "bytes", "Bytes of values that really went to (put) and came from (get) the store.", "kind"
)
STORE_ERRORS = _counter("store_errors", "", "Store calls that failed or ran out of time; each was a miss.")
WRONG_VALUES = _counter("wrong_bytes", "bytes", "Bytes of values that were not what their key stands for; all misses.")
PUTS_DROPPED = _counter("puts_dropped", "", "Chunks not put in the store because its queue was full.")

EVENT_BATCHES = _counter("event_batches", "", "Batches of KV events, published or held back by a fault.")
FAULTS = Metric(
    "kvhearth_emulator_faults", Kind.COUNTER, "", "Faults that happened because they were asked for.", ("fault",)
)
