"""What the emulator shows under vLLM's names is what vLLM 0.32 itself calls it."""

import re
from pathlib import Path

import pytest

import kvhearth.metrics.vllm  # noqa: F401 - defines them
import vllm
from kvhearth.metrics import all_metrics

SOURCE = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("v1/metrics", "distributed/kv_transfer", "v1/kv_offload")
    for path in Path(vllm.__file__).parent.joinpath(folder).rglob("*.py")
)
NAMES = set(re.findall(r"[\"'](vllm:[a-z0-9_]+)[\"']", SOURCE))
OURS = [metric for metric in all_metrics() if metric.name.startswith("vllm:")]


def test_there_is_something_to_compare() -> None:
    assert len(OURS) > 15
    assert len(NAMES) > 40


@pytest.mark.parametrize("metric", OURS, ids=lambda metric: metric.name)
def test_vllm_has_a_metric_of_that_name(metric: object) -> None:
    name = getattr(metric, "name")  # noqa: B009
    assert name in NAMES or f"{name}_total" in NAMES
