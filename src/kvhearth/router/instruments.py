"""The router's measurements: plain integers on the hot path, shown through a `Registry`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import Histogram

from kvhearth.metrics import MetricFamily, Registry
from kvhearth.metrics import router as names
from kvhearth.routing.policies.prefix import Prefix

if TYPE_CHECKING:
    from kvhearth.router.router import Router

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
        self._pieces_hit = 0
        self._pieces_missed = 0
        self.client_disconnects = 0
        self._first_byte: dict[str, Histogram] = {}
        self._duration: dict[str, Histogram] = {}
        self._first_byte_all = registry.histogram(names.FIRST_BYTE_SECONDS)
        self._duration_all = registry.histogram(names.DURATION_SECONDS)
        self._decision = registry.histogram(names.DECISION_SECONDS).labels(self._policy)
        registry.collect_from(self._read)

    def answered(self, model: str, engine: str, status: int) -> None:
        """A request has ended with this status (0: its connection was cut), given by ``engine`` or by the router."""
        self._requests[model, engine, status // 100] += 1

    def refused(self, code: str) -> None:
        """The router itself answered with this error code."""
        self._refusals[code] += 1

    def first_byte(self, model: str, seconds: float) -> None:
        """The first byte of a response body has arrived."""
        histogram = self._first_byte.get(model)
        if histogram is None:
            histogram = self._first_byte[model] = self._first_byte_all.labels(model)
        histogram.observe(seconds)

    def finished(self, model: str, seconds: float) -> None:
        """A response is complete."""
        histogram = self._duration.get(model)
        if histogram is None:
            histogram = self._duration[model] = self._duration_all.labels(model)
        histogram.observe(seconds)

    def decided(self, seconds: float, matched: int, pieces: int) -> None:
        """An engine was picked for a prompt of that many pieces."""
        self._decision.observe(seconds)
        self._pieces_hit += matched
        self._pieces_missed += pieces - matched

    def upstream_failed(self, engine: str, reason: str) -> None:
        """An attempt on an engine failed."""
        self._failures[engine, reason] += 1

    def retried(self, kind: str) -> None:
        """A request is sent again."""
        self._retries[kind] += 1

    def _read(self) -> Iterable[MetricFamily]:
        router, engines = self._router, self._router.fleet.engines
        healthy = len(router.fleet.healthy())
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
        yield MetricFamily(names.REQUESTS_IN_FLIGHT, [((e.name,), e.requests_in_flight) for e in engines])
        yield MetricFamily(names.TOKENS_IN_FLIGHT, [((e.name,), e.tokens_in_flight) for e in engines])
        yield MetricFamily(names.ENGINES, [(("healthy",), healthy), (("down",), len(engines) - healthy)])
        yield MetricFamily(names.CONNECTIONS, [((), len(router.clients))])
        yield MetricFamily(names.EXCHANGES, [((), len(router.exchanges))])
        yield MetricFamily(names.BUFFERED_BYTES, [((), router.buffered_bytes)])
        yield MetricFamily(names.PREFIX_INDEX_PIECES, [((), index_pieces)])
