"""The instruments of one process, made from definitions and shown as a Prometheus text page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import prometheus_client as prom
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as PromFamily
from prometheus_client.registry import Collector

from kvhearth.metrics.spec import Kind, Metric, MetricFamily
from kvhearth.metrics.tallies import Tallies, TalliesCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Registry:
    """Owns a process's instruments. Asking twice for the same definition gives the same instrument."""

    def __init__(self) -> None:
        # For the whole process, so only where a registry is ours: vLLM's keeps its own ways.
        prom.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = prom.CollectorRegistry()
        self._made: dict[str, Any] = {}

    def counter(self, metric: Metric) -> prom.Counter:
        """The counter of a definition; ``.labels(...)`` takes the labels in the definition's order."""
        instrument: prom.Counter = self._make(metric, Kind.COUNTER, prom.Counter)
        return instrument

    def gauge(self, metric: Metric) -> prom.Gauge:
        """The gauge of a definition."""
        instrument: prom.Gauge = self._make(metric, Kind.GAUGE, prom.Gauge)
        return instrument

    def histogram(self, metric: Metric) -> prom.Histogram:
        """The histogram of a definition, with its buckets."""
        instrument: prom.Histogram = self._make(metric, Kind.HISTOGRAM, prom.Histogram)
        return instrument

    def tallies(self, metric: Metric) -> Tallies:
        """The histogram of a definition with one label, for a hot path of one thread.

        Raises:
            ValueError: it is no histogram with one label, or is made already.
        """
        if metric.name in self._made:
            raise ValueError(f"metric {metric.name!r} has an instrument already")
        made = self._made[metric.name] = Tallies(metric)
        self._registry.register(TalliesCollector(made))
        return made

    def collect_from(self, read: Callable[[], Iterable[MetricFamily]]) -> None:
        """Show numbers that a room keeps itself (plain integers on a hot path), read at each scrape.

        ``read`` must be cheap and safe to call from the scraping thread. Counters and gauges only.
        """
        self._registry.register(_Reader(read))

    def expose(self) -> bytes:
        """The Prometheus text page (format 0.0.4, see ``CONTENT_TYPE``)."""
        return prom.generate_latest(self._registry)

    def _make(self, metric: Metric, kind: Kind, factory: Callable[..., Any]) -> Any:
        if metric.kind is not kind:
            raise ValueError(f"metric {metric.name!r} is a {metric.kind.value}, not a {kind.value}")
        if metric.name not in self._made:
            extra = {"buckets": metric.buckets} if kind is Kind.HISTOGRAM else {}
            self._made[metric.name] = factory(metric.name, metric.help, metric.labels, registry=self._registry, **extra)
        return self._made[metric.name]


class _Reader(Collector):
    def __init__(self, read: Callable[[], Iterable[MetricFamily]]) -> None:
        self._read = read

    def describe(self) -> Sequence[PromFamily]:
        return []

    def collect(self) -> Iterator[PromFamily]:
        for metric, samples in self._read():
            if metric.kind is Kind.HISTOGRAM:
                raise ValueError(f"metric {metric.name!r}: a histogram needs an instrument")
            shape = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = shape(metric.name, metric.help, labels=metric.labels)
            for label_values, value in samples:
                family.add_metric(label_values, value)
            yield family
