"""The emulated engine's numbers: request histograms as they happen, everything else read from the model at a scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvhearth.emulator.clock import SECOND_NS
from kvhearth.engine.ports import Finished, Job, JobKind
from kvhearth.metrics import Metric, MetricFamily, Registry, emulator, vllm

if TYPE_CHECKING:
    from kvhearth.emulator.answers import Answer
    from kvhearth.emulator.faults import Faults
    from kvhearth.emulator.loop import EngineLoop
    from kvhearth.emulator.store_io import StoreIo


class RequestMetrics:
    """vLLM's per-request histograms and counters, in emulated seconds.

    Args:
        registry: where they show.
        model_name, engine: values of vLLM's labels.
    """

    def __init__(self, registry: Registry, model_name: str, engine: str) -> None:
        def histogram(metric: Metric) -> Any:
            return registry.histogram(metric).labels(model_name, engine)

        success = registry.counter(vllm.REQUEST_SUCCESS)
        self._ended = {reason: success.labels(model_name, engine, reason) for reason in ("stop", "length", "abort")}
        self._ttft = histogram(vllm.TIME_TO_FIRST_TOKEN)
        self._gap = histogram(vllm.INTER_TOKEN_LATENCY)
        self._per_token = histogram(vllm.TIME_PER_OUTPUT_TOKEN)
        self._e2e = histogram(vllm.E2E_LATENCY)
        self._queue = histogram(vllm.QUEUE_TIME)
        self._prefill = histogram(vllm.PREFILL_TIME)
        self._decode = histogram(vllm.DECODE_TIME)
        self._inference = histogram(vllm.INFERENCE_TIME)
        self._prompt_tokens = histogram(vllm.REQUEST_PROMPT_TOKENS)
        self._generation_tokens = histogram(vllm.REQUEST_GENERATION_TOKENS)
        self._max_tokens = histogram(vllm.REQUEST_PARAMS_MAX_TOKENS)
        self._preemptions = histogram(vllm.REQUEST_NUM_PREEMPTIONS)
        self._computed = histogram(vllm.REQUEST_PREFILL_KV_COMPUTED_TOKENS)

    def first_token(self, answer: Answer) -> None:
        """An answer's first token exists."""
        self._ttft.observe((answer.first_ns - answer.arrival_ns) / SECOND_NS)

    def gaps(self, gaps: dict[int, int]) -> None:
        """Further tokens of a step: ns since the one before it → number of answers."""
        for gap_ns, times in gaps.items():
            _observe_many(self._gap, gap_ns / SECOND_NS, times)

    def finished(self, answer: Answer, done: Finished) -> None:
        """An answer is complete; ``done`` is the engine's account of it."""
        self._ended[answer.finish_reason].inc()
        self._e2e.observe((answer.last_ns - answer.arrival_ns) / SECOND_NS)
        self._queue.observe((answer.scheduled_ns - answer.arrival_ns) / SECOND_NS)
        self._prefill.observe((answer.first_ns - answer.scheduled_ns) / SECOND_NS)
        self._inference.observe((answer.last_ns - answer.scheduled_ns) / SECOND_NS)
        decode = (answer.last_ns - answer.first_ns) / SECOND_NS
        self._decode.observe(decode)
        if answer.produced > 1:
            self._per_token.observe(decode / (answer.produced - 1))
        self._prompt_tokens.observe(answer.request.prompt_tokens)
        self._generation_tokens.observe(answer.produced)
        self._preemptions.observe(done.preemptions)
        self._computed.observe(done.sources.compute)
        if (max_tokens := answer.call.max_tokens) is not None:
            self._max_tokens.observe(max_tokens)

    def aborted(self) -> None:
        """A client went away before its answer was complete."""
        self._ended["abort"].inc()


def _observe_many(histogram: Any, value: float, times: int) -> None:
    """``times`` calls of ``histogram.observe(value)`` in one.

    A step's tokens nearly all follow the one before them by the same time, and observing them one by one is a third of
    the cost of a step. prometheus_client has no call for it, so this does what its ``observe`` does (as of 0.26).
    """
    histogram._sum.inc(value * times)
    histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(times)


class JobMetrics:
    """Loads and stores between HBM and DRAM, as vLLM's offloading connector counts them."""

    def __init__(self, registry: Registry, model_name: str, engine: str) -> None:
        labels = (model_name, engine)
        total = registry.counter(vllm.KV_OFFLOAD_TOTAL_TIME)
        self._kinds = {
            kind: (
                registry.counter(seconds).labels(*labels),
                registry.histogram(size).labels(*labels),
                total.labels(*labels, older_name),
            )
            for kind, seconds, size, older_name in (
                (JobKind.LOAD, vllm.KV_OFFLOAD_LOAD_TIME, vllm.KV_OFFLOAD_LOAD_SIZE, "CPU_to_GPU"),
                (JobKind.SAVE, vllm.KV_OFFLOAD_STORE_TIME, vllm.KV_OFFLOAD_STORE_SIZE, "GPU_to_CPU"),
            )
        }

    def done(self, job: Job, duration_ns: int) -> None:
        """A job ended; fetches and puts are none of vLLM's and are counted by bytes only."""
        if job.kind in self._kinds:
            seconds, size, older_seconds = self._kinds[job.kind]
            seconds.inc(duration_ns / SECOND_NS)
            older_seconds.inc(duration_ns / SECOND_NS)
            size.observe(job.nbytes)


class Exposition:
    """Reads every rank when asked.

    Args:
        ranks: in order.
        faults: of all of them.
    """

    def __init__(self, ranks: Sequence[RankExposition], faults: Faults) -> None:
        self._ranks = ranks
        self._faults = faults

    def state(self) -> dict[str, Any]:
        """As one JSON object: a single rank's state, or several under ``ranks`` with their load and counters summed."""
        states = [rank.state() for rank in self._ranks]
        if len(states) == 1:
            return states[0]
        summed = {name: sum(state[name] for state in states) for name in ("running", "waiting", "requests_aborted")}
        counters = {name: sum(state["counters"][name] for state in states) for name in states[0]["counters"]}
        return {**summed, "counters": counters, "ranks": states}

    def families(self) -> Iterator[MetricFamily]:
        """For `Registry.collect_from`: each metric once, with the samples of all ranks."""
        merged: dict[str, tuple[Metric, list[Any]]] = {}
        for rank in self._ranks:
            for metric, samples in rank.families():
                merged.setdefault(metric.name, (metric, []))[1].extend(samples)
        for metric, samples in merged.values():
            yield MetricFamily(metric, samples)
        happened = [((kind,), float(times)) for kind, times in self._faults.happened.items()]
        yield MetricFamily(emulator.FAULTS, happened)


class RankExposition:
    """Reads one rank's loop, its model and its store when asked.

    Args:
        model_name, engine: values of vLLM's labels.
    """

    def __init__(
        self,
        loop: EngineLoop,
        store: StoreIo | None,
        *,
        model_name: str,
        engine: str,
        store_bytes_scale: int,
    ) -> None:
        self._loop = loop
        self._store = store
        self._vllm = (model_name, engine)
        self._ours = (engine,)
        self._store_bytes_scale = store_bytes_scale

    def state(self) -> dict[str, Any]:
        """The same as one JSON object: what ``/emulator/state`` shows."""
        loop, model = self._loop, self._loop.model
        state: dict[str, Any] = {
            "emulated_now_seconds": loop.clock.now_ns() / SECOND_NS,
            "time_scale": loop.clock.time_scale,
            "lag_max_seconds": loop.lag.max_ns / SECOND_NS,
            "lag_p99_seconds": loop.lag.p99_ns() / SECOND_NS,
            "lag_total_seconds": loop.lag.total_ns / SECOND_NS,
            "lag_steps": loop.lag.steps,
            "store_lag_seconds": loop.transfers.store_lag_ns / SECOND_NS,
            "store_read_lag_seconds": loop.transfers.store_read_lag_ns / SECOND_NS,
            "running": model.num_running,
            "waiting": model.num_waiting + loop.queued,
            "requests_aborted": loop.aborted,
            "kv_usage": model.kv_usage,
            "dram_usage": model.dram_usage,
            "counters": asdict(model.counters),
        }
        if (publisher := loop.publisher) is not None:
            state["kv_events"] = {
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
                "batches": publisher.batches,
            }
        if self._store is not None:
            state["store"] = {"up": self._store.up, "bytes_scale": self._store_bytes_scale, **self._store.counts()}
        return state

    def families(self) -> Iterator[MetricFamily]:
        """For `Registry.collect_from`."""
        yield from self._of_vllm()
        yield from self._of_emulator()
        if self._store is not None:
            yield from self._of_store(self._store)

    def _of_vllm(self) -> Iterator[MetricFamily]:
        model, labels = self._loop.model, self._vllm
        counters = model.counters
        cached = counters.prompt_tokens - counters.prompt_tokens_compute
        external = counters.prompt_tokens_dram + counters.prompt_tokens_store
        plain: list[tuple[Metric, float]] = [
            (vllm.NUM_REQUESTS_RUNNING, model.num_running),
            (vllm.NUM_REQUESTS_WAITING, model.num_waiting + self._loop.queued),
            (vllm.KV_CACHE_USAGE, model.kv_usage),
            (vllm.PREFIX_CACHE_QUERIES, counters.prefix_cache_queries),
            (vllm.PREFIX_CACHE_HITS, counters.prefix_cache_hits),
            (vllm.EXTERNAL_PREFIX_CACHE_QUERIES, counters.external_prefix_cache_queries),
            (vllm.EXTERNAL_PREFIX_CACHE_HITS, counters.external_prefix_cache_hits),
            (vllm.NUM_PREEMPTIONS, counters.preemptions),
            (vllm.PROMPT_TOKENS, counters.prompt_tokens),
            (vllm.PROMPT_TOKENS_CACHED, cached),
            (vllm.GENERATION_TOKENS, counters.generation_tokens),
            (vllm.KV_OFFLOAD_LOAD_BYTES, counters.load_bytes),
            (vllm.KV_OFFLOAD_STORE_BYTES, counters.save_bytes),
        ]
        for metric, value in plain:
            yield MetricFamily(metric, [(labels, value)])
        by_label: list[tuple[Metric, dict[str, int]]] = [
            (
                vllm.PROMPT_TOKENS_BY_SOURCE,
                {
                    "local_compute": counters.prompt_tokens_compute,
                    "local_cache_hit": counters.prompt_tokens_hbm,
                    "external_kv_transfer": external,
                },
            ),
            (
                vllm.PROMPT_TOKENS_CACHED_BY_SOURCE,
                {
                    "device": counters.prompt_tokens_hbm,
                    "host": counters.prompt_tokens_dram,
                    "external_unspecified": counters.prompt_tokens_store,
                },
            ),
            (vllm.KV_OFFLOAD_TOTAL_BYTES, {"CPU_to_GPU": counters.load_bytes, "GPU_to_CPU": counters.save_bytes}),
        ]
        for metric, values in by_label:
            yield MetricFamily(metric, [((*labels, value), count) for value, count in values.items()])

    def _of_emulator(self) -> Iterator[MetricFamily]:
        loop, labels = self._loop, self._ours
        counters = loop.model.counters
        plain: list[tuple[Metric, float]] = [
            (emulator.TIME_SCALE, loop.clock.time_scale),
            (emulator.NOW, loop.clock.now_ns() / SECOND_NS),
            (emulator.STEPS, counters.steps),
            (emulator.LAG, loop.lag.total_ns / SECOND_NS),
            (emulator.LAG_MAX, loop.lag.max_ns / SECOND_NS),
            (emulator.LAG_P99, loop.lag.p99_ns() / SECOND_NS),
            (emulator.STORE_LAG, loop.transfers.store_lag_ns / SECOND_NS),
            (emulator.REPREFILL, counters.reprefill_tokens),
            (emulator.REPREFILLS_AVOIDED, counters.reprefills_avoided),
            (emulator.REPREFILL_AVOIDED, counters.reprefill_avoided_tokens),
            (emulator.REQUESTS_ABORTED, loop.aborted),
            (emulator.FAILED_LOADS, counters.failed_loads),
            (emulator.EVENT_BATCHES, 0 if loop.publisher is None else loop.publisher.batches),
        ]
        for metric, value in plain:
            yield MetricFamily(metric, [(labels, value)])
        by_source = {
            "hbm": counters.prompt_tokens_hbm,
            "dram": counters.prompt_tokens_dram,
            "store": counters.prompt_tokens_store,
            "compute": counters.prompt_tokens_compute,
        }
        yield MetricFamily(emulator.PROMPT_TOKENS, [((*labels, source), count) for source, count in by_source.items()])
        moved = {
            "load": counters.load_bytes,
            "save": counters.save_bytes,
            "fetch": counters.fetch_bytes,
            "put": counters.put_bytes,
        }
        yield MetricFamily(emulator.MOVED, [((*labels, kind), count) for kind, count in moved.items()])

    def _of_store(self, store: StoreIo) -> Iterator[MetricFamily]:
        labels, counts = self._ours, store.counts()
        yield MetricFamily(emulator.STORE_UP, [(labels, float(store.up))])
        yield MetricFamily(emulator.STORE_BYTES_SCALE, [(labels, self._store_bytes_scale)])
        payload = [((*labels, "get"), counts["get_bytes"]), ((*labels, "put"), counts["put_bytes"])]
        yield MetricFamily(emulator.STORE_PAYLOAD, payload)
        yield MetricFamily(emulator.STORE_ERRORS, [(labels, counts["errors"])])
        yield MetricFamily(emulator.WRONG_VALUES, [(labels, counts["wrong_bytes"])])
        yield MetricFamily(emulator.PUTS_DROPPED, [(labels, counts["puts_dropped"])])
