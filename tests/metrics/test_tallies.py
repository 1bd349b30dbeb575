"""A histogram of plain integers shows what `prometheus_client`'s own shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.metrics import Kind, Metric, Registry, parse_exposition

from .test_registry import fresh

VALUES = st.floats(0, 500, allow_nan=False) | st.sampled_from([0.0, 0.001, 1.0, 2.5, 160.0, 160.1])


@given(st.lists(st.tuples(st.sampled_from(["m", "n"]), VALUES)))
def test_it_shows_the_same_as_the_librarys_own(observed: list[tuple[str, float]]) -> None:
    metric = fresh(Kind.HISTOGRAM, unit="seconds", labels=("model",))
    ours, theirs = Registry(), Registry()
    tallies, histogram = ours.tallies(metric), theirs.histogram(metric)
    for model, value in observed:
        tallies[model].observe(value)
        histogram.labels(model).observe(value)
    assert ours.expose() == theirs.expose()
    parse_exposition(ours.expose().decode())


@pytest.mark.parametrize(
    ("kind", "labels"), [(Kind.COUNTER, ("a",)), (Kind.HISTOGRAM, ()), (Kind.HISTOGRAM, ("a", "b"))]
)
def test_only_histograms_with_one_label_have_it(kind: Kind, labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="one label"):
        Registry().tallies(fresh(kind, labels=labels))


def test_a_metric_has_one_instrument() -> None:
    metric: Metric = fresh(Kind.HISTOGRAM, labels=("a",))
    registry = Registry()
    registry.histogram(metric)
    with pytest.raises(ValueError, match="already"):
        registry.tallies(metric)
