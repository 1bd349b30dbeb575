"""A metric has one name, one meaning, and shows as Prometheus expects it."""

import uuid

import pytest

from kvhearth.metrics import Kind, Metric, MetricFamily, Registry, parse_exposition


def fresh(kind: Kind, unit: str = "bytes", labels: tuple[str, ...] = ()) -> Metric:
    name = "kvhearth_test_" + "".join(c for c in uuid.uuid4().hex) + (f"_{unit}" if unit else "")
    return Metric(name, kind, unit, "A test.", labels)


def test_counter_shows_with_total_and_labels() -> None:
    metric = fresh(Kind.COUNTER, labels=("tier",))
    registry = Registry()
    registry.counter(metric).labels("dram").inc(3)
    page = parse_exposition(registry.expose().decode())
    assert page[metric.exposed_name] == {(("tier", "dram"),): 3.0}
    assert metric.exposed_name.endswith("_bytes_total")


def test_asking_twice_gives_the_same_instrument() -> None:
    metric, registry = fresh(Kind.GAUGE), Registry()
    assert registry.gauge(metric) is registry.gauge(metric)


def test_reader_is_asked_at_each_scrape() -> None:
    metric, registry = fresh(Kind.COUNTER, labels=("source",)), Registry()
    numbers = {"hbm": 1.0}
    registry.collect_from(lambda: [MetricFamily(metric, [((k,), v) for k, v in numbers.items()])])
    numbers["hbm"] = 7.0
    assert parse_exposition(registry.expose().decode())[metric.exposed_name] == {(("source", "hbm"),): 7.0}


def test_wrong_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="is a gauge, not a counter"):
        Registry().counter(fresh(Kind.GAUGE))


@pytest.mark.parametrize("name", ["requests", "kvhearth_x_bytes_total", "kvhearth_store_reads", "vllm:Bad"])
def test_names_follow_the_convention(name: str) -> None:
    with pytest.raises(ValueError, match="metric name"):
        Metric(name, Kind.COUNTER, "bytes", "A test.")


def test_a_name_is_defined_once() -> None:
    metric = fresh(Kind.COUNTER)
    with pytest.raises(ValueError, match="defined twice"):
        Metric(metric.name, Kind.COUNTER, "bytes", "Again.")


def test_histogram_has_its_buckets() -> None:
    metric, registry = fresh(Kind.HISTOGRAM, unit="seconds"), Registry()
    registry.histogram(metric).observe(0.03)
    page = parse_exposition(registry.expose().decode())
    assert page[f"{metric.name}_bucket"][(("le", "0.04"),)] == 1.0
    assert page[f"{metric.name}_bucket"][(("le", "0.02"),)] == 0.0
