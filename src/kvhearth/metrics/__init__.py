"""Every metric of kvhearth, named once: name, type, unit, labels and help.

One module a room holds that room's definitions (``metrics.store``, ``metrics.router``, …; ``metrics.vllm`` holds the
names that vLLM itself exposes). A room asks its `Registry` for the instrument of a definition; nothing else makes one.
"""

from kvhearth.metrics.registry import Registry
from kvhearth.metrics.spec import Kind, Metric, MetricFamily, all_metrics, parse_exposition

__all__ = ["Kind", "Metric", "MetricFamily", "Registry", "all_metrics", "parse_exposition"]
