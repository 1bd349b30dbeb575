"""What a metric is: a name with a meaning. No state; `Registry` makes the instruments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

_NAME = re.compile(r"kvhearth_[a-z]+_[a-z0-9_]+|vllm:[a-z0-9_]+")

LATENCY_BUCKETS_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
"""Upper bounds in seconds: vLLM's own time-to-first-token buckets up to 160 s, so that both can share a panel."""


class Kind(Enum):
    """Prometheus' metric types, as far as they are used here."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_REGISTERED: dict[str, Metric] = {}


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of one metric family.

    Args:
        name: ``kvhearth_<room>_<what>_<unit>``, or vLLM's own ``vllm:…`` name; counters without ``_total``.
        kind: counter, gauge or histogram.
        unit: base unit (``seconds``, ``bytes``, ``tokens``, …) or ``""`` for a plain count or ratio.
        labels: label names in the order in which instruments take them.
        help: one sentence for whoever reads the exposition.
        buckets: upper bounds for a histogram, in ``unit``.

    Raises:
        ValueError: the name breaks the convention, or was defined before.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = field(default=LATENCY_BUCKETS_SECONDS)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"metric name {self.name!r}: want kvhearth_<room>_<what>_<unit> or vllm:<name>")
        if self.name.endswith("_total"):
            raise ValueError(f"metric name {self.name!r}: '_total' is added by the exposition")
        if self.name.startswith("kvhearth_") and self.unit and not self.name.endswith(f"_{self.unit}"):
            raise ValueError(f"metric name {self.name!r} must end in its unit _{self.unit}")
        if self.name in _REGISTERED:
            raise ValueError(f"metric {self.name!r} is defined twice")
        _REGISTERED[self.name] = self

    @property
    def exposed_name(self) -> str:
        """Name of the sample that a scrape shows (counters gain ``_total``)."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


class MetricFamily(NamedTuple):
    """Samples of one family at one moment, for a collector that keeps its own numbers.

    ``samples`` holds (label values, value); label values follow ``metric.labels``.
    """

    metric: Metric
    samples: Sequence[tuple[tuple[str, ...], float]]


def all_metrics() -> list[Metric]:
    """Every definition imported so far, by name."""
    return sorted(_REGISTERED.values(), key=lambda metric: metric.name)


def parse_exposition(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Read a Prometheus text page into ``{sample name: {sorted label pairs: value}}``.

    Raises:
        ValueError: the text is not a Prometheus exposition.
    """
    page: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            page.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = float(sample.value)
    return page
