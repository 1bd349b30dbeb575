"""The metrics that vLLM itself exposes, under vLLM's names and labels, as far as kvhearth shows or reads them.

Names, labels and buckets are those of vLLM 0.32 (``vllm/v1/metrics/loggers.py``, ``buckets.py`` and the offloading
connector's ``metrics.py``). Where kvhearth shows them from an emulated engine, times are in emulated seconds.
"""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

ENGINE_LABELS = ("model_name", "engine")

_EMULATED = " From an emulated engine: in emulated seconds."
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_TOKEN_COUNT_BUCKETS = (*(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),)
_TRANSFER_SIZE_BUCKETS = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
_PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


def _gauge(name: str, text: str, *more_labels: str) -> Metric:
    return Metric(f"vllm:{name}", Kind.GAUGE, "", text, ENGINE_LABELS + more_labels)


def _counter(name: str, unit: str, text: str, *more_labels: str) -> Metric:
    return Metric(f"vllm:{name}", Kind.COUNTER, unit, text, ENGINE_LABELS + more_labels)


def _histogram(name: str, unit: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(f"vllm:{name}", Kind.HISTOGRAM, unit, text, ENGINE_LABELS, buckets)


def _seconds(name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return _histogram(name, "seconds", text + _EMULATED, buckets)


NUM_REQUESTS_RUNNING = _gauge("num_requests_running", "Requests in the running batch.")
NUM_REQUESTS_WAITING = _gauge("num_requests_waiting", "Requests waiting to be scheduled.")
KV_CACHE_USAGE = _gauge("kv_cache_usage_perc", "Share of HBM KV blocks in use by requests; 1 means all.")

PREFIX_CACHE_QUERIES = _counter("prefix_cache_queries", "tokens", "Prompt tokens looked up in the HBM prefix cache.")
PREFIX_CACHE_HITS = _counter("prefix_cache_hits", "tokens", "Prompt tokens found in the HBM prefix cache.")
EXTERNAL_PREFIX_CACHE_QUERIES = _counter(
    "external_prefix_cache_queries", "tokens", "Prompt tokens looked up behind the KV connector."
)
EXTERNAL_PREFIX_CACHE_HITS = _counter(
    "external_prefix_cache_hits", "tokens", "Prompt tokens found behind the KV connector."
)
NUM_PREEMPTIONS = _counter("num_preemptions", "", "Running requests put back for want of KV blocks.")
PROMPT_TOKENS = _counter("prompt_tokens", "tokens", "Prompt tokens processed.")
PROMPT_TOKENS_BY_SOURCE = _counter(
    "prompt_tokens_by_source",
    "tokens",
    "Prompt tokens by where their KV came from: local_compute, local_cache_hit or external_kv_transfer.",
    "source",
)
PROMPT_TOKENS_CACHED = _counter("prompt_tokens_cached", "tokens", "Prompt tokens whose KV was not computed.")
PROMPT_TOKENS_CACHED_BY_SOURCE = _counter(
    "prompt_tokens_cached_by_source",
    "tokens",
    "Cached prompt tokens by tier: device (HBM), host (engine DRAM) or external_unspecified (the store).",
    "source",
)
GENERATION_TOKENS = _counter("generation_tokens", "tokens", "Tokens generated.")
REQUEST_SUCCESS = _counter("request_success", "", "Requests that ended, by reason.", "finished_reason")

REQUEST_PROMPT_TOKENS = _histogram("request_prompt_tokens", "tokens", "Prompt tokens a request.", _TOKEN_COUNT_BUCKETS)
REQUEST_GENERATION_TOKENS = _histogram(
    "request_generation_tokens", "tokens", "Generated tokens a request.", _TOKEN_COUNT_BUCKETS
)
REQUEST_PARAMS_MAX_TOKENS = _histogram(
    "request_params_max_tokens", "tokens", "The max_tokens parameter of requests.", _TOKEN_COUNT_BUCKETS
)
REQUEST_NUM_PREEMPTIONS = _histogram("request_num_preemptions", "", "Preemptions a request.", _PREEMPTION_BUCKETS)
REQUEST_PREFILL_KV_COMPUTED_TOKENS = _histogram(
    "request_prefill_kv_computed_tokens",
    "tokens",
    "Prompt tokens whose KV a request had to compute.",
    _TOKEN_COUNT_BUCKETS,
)

TIME_TO_FIRST_TOKEN = _seconds("time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS)
INTER_TOKEN_LATENCY = _seconds(
    "inter_token_latency_seconds", "Between consecutive tokens of a request.", _TOKEN_BUCKETS_SECONDS
)
TIME_PER_OUTPUT_TOKEN = _seconds(
    "request_time_per_output_token_seconds",
    "Mean time a token after the first, a request.",
    _TOKEN_BUCKETS_SECONDS,
)
E2E_LATENCY = _seconds("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS_SECONDS)
QUEUE_TIME = _seconds("request_queue_time_seconds", "From arrival to being first scheduled.", _REQUEST_BUCKETS_SECONDS)
PREFILL_TIME = _seconds(
    "request_prefill_time_seconds", "From being first scheduled to the first token.", _REQUEST_BUCKETS_SECONDS
)
DECODE_TIME = _seconds(
    "request_decode_time_seconds", "From the first token to the last token.", _REQUEST_BUCKETS_SECONDS
)
INFERENCE_TIME = _seconds(
    "request_inference_time_seconds", "From being first scheduled to the last token.", _REQUEST_BUCKETS_SECONDS
)

KV_OFFLOAD_LOAD_BYTES = _counter("kv_offload_load_bytes", "bytes", "KV loaded into HBM from DRAM.")
KV_OFFLOAD_LOAD_TIME = _counter("kv_offload_load_time", "seconds", "Time spent in loads into HBM." + _EMULATED)
KV_OFFLOAD_LOAD_SIZE = _histogram("kv_offload_load_size", "bytes", "Bytes a load.", _TRANSFER_SIZE_BUCKETS)
KV_OFFLOAD_STORE_BYTES = _counter("kv_offload_store_bytes", "bytes", "KV stored out of HBM into DRAM.")
KV_OFFLOAD_STORE_TIME = _counter("kv_offload_store_time", "seconds", "Time spent in stores out of HBM." + _EMULATED)
KV_OFFLOAD_STORE_SIZE = _histogram("kv_offload_store_size", "bytes", "Bytes a store.", _TRANSFER_SIZE_BUCKETS)
KV_OFFLOAD_TOTAL_BYTES = _counter(
    "kv_offload_total_bytes", "bytes", "KV moved between HBM and DRAM (vLLM's older name).", "transfer_type"
)
KV_OFFLOAD_TOTAL_TIME = _counter(
    "kv_offload_total_time",
    "seconds",
    "Time spent moving KV between HBM and DRAM (vLLM's older name)." + _EMULATED,
    "transfer_type",
)
