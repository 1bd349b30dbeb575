"""Histograms for a hot path of one thread: plain integers, without `prometheus_client`'s locks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as PromFamily
from prometheus_client.registry import Collector

from kvhearth.metrics.spec import Kind, Metric


class Tally:
    """The observations of one label value. Only one thread may observe; any may read."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose upper bound it does not exceed."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> tuple[list[int], float]:
        """Counts up to each bound and in all, and the sum of the values."""
        return list(accumulate(self._counts)), self._sum


class Tallies(dict[str, Tally]):
    """A histogram with one label: a `Tally` by the label's value, made when it is first asked for.

    Raises:
        ValueError: the metric is no histogram with one label.
    """

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        if metric.kind is not Kind.HISTOGRAM or len(metric.labels) != 1:
            raise ValueError(f"metric {metric.name!r} is no histogram with one label")
        self.metric = metric
        self.bounds = tuple(map(float, metric.buckets))

    def __missing__(self, label: str) -> Tally:
        tally = self[label] = Tally(self.bounds)
        return tally


class TalliesCollector(Collector):
    """Shows them to `prometheus_client`."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._names = [str(bound) for bound in tallies.bounds] + ["+Inf"]

    def describe(self) -> Sequence[PromFamily]:
        """Nothing: the names are checked where metrics are defined."""
        return []

    def collect(self) -> Iterator[PromFamily]:
        """The family as it is now."""
        metric = self._tallies.metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for label, tally in list(self._tallies.items()):
            counts, total = tally.read()
            family.add_metric([label], buckets=list(zip(self._names, counts, strict=True)), sum_value=total)
        yield family
