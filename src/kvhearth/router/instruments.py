"""The router's measurements: plain integers on the hot path, shown through a `Registry`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvhearth.metrics import MetricFamily, Registry
from kvhearth.metrics import router as names
from kvhearth.metrics import router_fleet as fleet_names
from kvhearth.router.usage import Usage
from kvhearth.routing.policies.prefix import Prefix
from kvhearth.routing.ports import Decision, RouteRequest

if TYPE_CHECKING:
    from kvhearth.router.router import Router

_STATES = ("healthy", "draining", "broken", "trial", "down", "leaving")
_STATUS_CLASS = {0: "cut", 1: "1xx", 2: "2xx", 3: "3xx", 4: "4xx", 5: "5xx"}


class Instruments:
    """Counts what happens; reads gauges from the router's own state at each scrape, so they cannot drift from it."""

    def __init__(self, router: Router, registry: Registry) -> None:
        self._router = router
        self._policy = router.policy.name
        self._requests: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self._failures: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._retries: defaultdict[str, int] = defaultdict(int)
        self._refusals: defaultdict[str, int] = defaultdict(int)
        self._usage: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._hits: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._misses: defaultdict[str, int] = defaultdict(int)
        self._load_failures: defaultdict[str, int] = defaultdict(int)
        self._queue_outcomes: Counter[str] = Counter()
        self._pieces_hit = 0
        self._pieces_missed = 0
        self.client_disconnects = 0
        self._first_byte = registry.tallies(names.FIRST_BYTE_SECONDS)
        self._inter_token = registry.tallies(names.INTER_TOKEN_SECONDS)
        self._duration = registry.tallies(names.DURATION_SECONDS)
        self._predicted = registry.tallies(names.PREDICTED_SECONDS)
        self._ratio = registry.tallies(names.PREDICTION_RATIO)
        self._queue_seconds = registry.tallies(fleet_names.QUEUE_SECONDS)
        self._decision = registry.tallies(names.DECISION_SECONDS)[self._policy]
        registry.collect_from(self._read)
        registry.collect_from(self._read_fleet)

    def answered(self, model: str, engine: str, status: int) -> None:
        """A request has ended with this status (0: its connection was cut), given by ``engine`` or by the router."""
        self._requests[model, engine, status // 100] += 1

    def refused(self, code: str) -> None:
        """The router itself answered with this error code."""
        self._refusals[code] += 1

    def first_byte(self, model: str, seconds: float) -> None:
        """The first byte of a response body has arrived."""
        self._first_byte[model].observe(seconds)

    def inter_token(self, model: str, seconds: float) -> None:
        """A streamed response is complete, with that mean time between its tokens."""
        self._inter_token[model].observe(seconds)

    def finished(self, model: str, seconds: float) -> None:
        """A response is complete."""
        self._duration[model].observe(seconds)

    def used(self, model: str, usage: Usage) -> None:
        """A complete response told its tokens."""
        sums = self._usage[model]
        sums[0] += usage.prompt
        sums[1] += usage.cached
        sums[2] += usage.completion

    def predicted(self, model: str, predicted_seconds: float, observed_seconds: float) -> None:
        """A first token has come for which there was a prediction (above 0)."""
        self._predicted[model].observe(predicted_seconds)
        self._ratio[model].observe(observed_seconds / predicted_seconds)

    def decided(self, seconds: float, route: RouteRequest, decision: Decision) -> None:
        """A target was picked."""
        self._decision.observe(seconds)
        pieces = len(route.prefix_hashes)
        if pieces:
            self._pieces_hit += decision.matched
            self._pieces_missed += pieces - decision.matched
        if route.block_tokens or route.unkeyed:
            sums = self._hits[route.model]
            hits = decision.hits
            sums[0] += hits.hbm
            sums[1] += hits.dram
            sums[2] += hits.store
            sums[3] += max(0, route.prompt_tokens - sum(hits))
            if decision.miss_reason:
                self._misses[decision.miss_reason] += 1

    def queued(self, outcome: str) -> None:
        """What became of a request that had to wait for an engine: see the metric."""
        self._queue_outcomes[outcome] += 1

    def seated(self, model: str, seconds: float) -> None:
        """A request is sent that had to wait that long."""
        self._queue_outcomes["sent"] += 1
        self._queue_seconds[model].observe(seconds)

    def load_report_failed(self, engine: str) -> None:
        """An engine's metrics page was not to be had, or had no load on it."""
        self._load_failures[engine] += 1

    def upstream_failed(self, engine: str, reason: str) -> None:
        """An attempt on an engine failed."""
        self._failures[engine, reason] += 1

    def retried(self, kind: str) -> None:
        """A request is sent again."""
        self._retries[kind] += 1

    def _read(self) -> Iterable[MetricFamily]:
        router = self._router
        targets = list(router.fleet.targets.values())
        index_pieces = router.policy.size if isinstance(router.policy, Prefix) else 0
        requests = [
            ((model, engine, _STATUS_CLASS[status], self._policy), float(count))
            for (model, engine, status), count in self._requests.items()
        ]
        yield MetricFamily(names.REQUESTS, requests)
        yield MetricFamily(names.UPSTREAM_FAILURES, [(key, float(count)) for key, count in self._failures.items()])
        yield MetricFamily(names.RETRIES, [((kind,), float(count)) for kind, count in self._retries.items()])
        yield MetricFamily(names.REFUSALS, [((code,), float(count)) for code, count in self._refusals.items()])
        yield MetricFamily(names.CLIENT_DISCONNECTS, [((), self.client_disconnects)])
        yield MetricFamily(names.PREFIX_PIECES, [(("hit",), self._pieces_hit), (("miss",), self._pieces_missed)])
        yield MetricFamily(names.USAGE_TOKENS, _by_kind(self._usage, ("prompt", "cached", "completion")))
        yield MetricFamily(names.PROMPT_TOKENS, _by_kind(self._hits, ("hbm", "dram", "store", "compute")))
        yield MetricFamily(names.MISSES, [((reason,), float(count)) for reason, count in self._misses.items()])
        yield MetricFamily(
            names.LOAD_REPORT_FAILURES, [((name,), count) for name, count in self._load_failures.items()]
        )
        yield MetricFamily(names.REQUESTS_IN_FLIGHT, [((t.name,), t.requests_in_flight) for t in targets])
        yield MetricFamily(names.TOKENS_IN_FLIGHT, [((t.name,), t.tokens_in_flight) for t in targets])
        yield MetricFamily(names.PREFILL_TOKENS, [((t.name,), t.prefill_tokens) for t in targets])
        yield MetricFamily(names.TTFT_FACTOR, [((t.name,), t.ttft_factor) for t in targets])
        reported = [
            ((target.name, state), float(count))
            for target in targets
            for state, count in (("running", target.running), ("waiting", target.waiting))
        ]
        yield MetricFamily(names.ENGINE_REQUESTS, reported)
        yield MetricFamily(names.CONNECTIONS, [((), len(router.clients))])
        yield MetricFamily(names.EXCHANGES, [((), len(router.exchanges))])
        yield MetricFamily(names.BUFFERED_BYTES, [((), router.buffered_bytes)])
        yield MetricFamily(names.PREFIX_INDEX_PIECES, [((), index_pieces)])

    def _read_fleet(self) -> Iterable[MetricFamily]:
        router, engines = self._router, self._router.fleet.engines
        states = Counter(engine.state for engine in engines)
        states["leaving"] = len(router.fleet.leaving)
        yield MetricFamily(fleet_names.ENGINES, [((state,), float(states[state])) for state in _STATES])
        opened = [((engine.name,), float(engine.breaker.opened)) for engine in engines]
        yield MetricFamily(fleet_names.BREAKER_OPENED, opened)
        capacity = [((engine.name,), float(engine.capacity.most)) for engine in engines]
        yield MetricFamily(fleet_names.ENGINE_CAPACITY, capacity)
        yield MetricFamily(fleet_names.RETRIES_SAVED, [((), router.retries.saved)])
        yield MetricFamily(fleet_names.CONFIG_GENERATION, [((), float(router.reloader.generation))])
        yield MetricFamily(fleet_names.CONFIG_FAILURES, [((), float(router.reloader.failures))])
        waiting = router.waiting
        queued = [((model,), float(waiting.waiting_for(model))) for model in waiting.models()]
        yield MetricFamily(fleet_names.QUEUED_REQUESTS, queued)
        outcomes = [((outcome,), float(count)) for outcome, count in self._queue_outcomes.items()]
        yield MetricFamily(fleet_names.QUEUE_OUTCOMES, outcomes)


def _by_kind(sums: Mapping[str, Sequence[int]], kinds: tuple[str, ...]) -> list[tuple[tuple[str, str], float]]:
    return [((model, kind), float(n)) for model, counts in sums.items() for kind, n in zip(kinds, counts, strict=True)]
