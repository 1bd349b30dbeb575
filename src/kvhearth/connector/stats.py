"""From our metric definitions to vLLM's: what an engine's ``/metrics`` page shows of the connector."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvhearth.metrics import Kind, Metric
from kvhearth.metrics import connector as m

_SHAPES = {Kind.COUNTER: OffloadingCounterMetadata, Kind.GAUGE: OffloadingGaugeMetadata}


def _definitions(*metrics: Metric) -> dict[str, OffloadingMetricMetadata]:
    return {
        metric.name: _SHAPES[metric.kind](documentation=metric.help, labelnames=metric.labels) for metric in metrics
    }


DEFINITIONS = _definitions(
    m.LOOKUPS,
    m.AWAITED,
    m.GET_BYTES,
    m.GET_FAILURES,
    m.PUT_BYTES,
    m.PUT_CHUNKS,
    m.PUT_QUEUE,
    m.STORE_UP,
    m.MISMATCH,
    m.EPOCHS,
)
"""The tier's metrics, by name, as vLLM wants them."""

CONNECTOR_DEFINITIONS = _definitions(m.SCHEDULER_SECONDS, m.LAZY_CHUNKS)
"""Those of the connector itself, with and without a store."""


class Deltas:
    """Counters and gauges that change here and are handed over as what changed since the last time."""

    def __init__(self) -> None:
        self._added: dict[tuple[str, tuple[str, ...]], float] = {}
        self._levels: dict[tuple[str, tuple[str, ...]], float] = {}
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._moved: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, metric: Metric, number: float = 1, *labels: str) -> None:
        """Count ``number`` more."""
        key = (metric.name, labels)
        self._added[key] = self._added.get(key, 0) + number

    def level(self, metric: Metric, number: float, *labels: str) -> None:
        """The counter stands at ``number``, kept by someone else."""
        key = (metric.name, labels)
        self.add(metric, number - self._levels.get(key, 0), *labels)
        self._levels[key] = number

    def level_gauge(self, metric: Metric, number: float, *labels: str) -> None:
        """The gauge stands at ``number``."""
        key = (metric.name, labels)
        if self._gauges.get(key) != number:
            self._gauges[key] = self._moved[key] = number

    def emit(self, stats: OffloadingConnectorStats) -> None:
        """Hand over what was added."""
        for (name, labels), number in self._added.items():
            if number:
                stats.increase_counter(name, number, labels)
        self._added.clear()
        for (name, labels), number in self._moved.items():
            stats.set_gauge(name, number, labels)
        self._moved.clear()
