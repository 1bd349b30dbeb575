"""A router whose engines come and go while it serves: file discovery and live configuration, end to end."""

from __future__ import annotations

import threading

import pytest
from tests.router.conftest import RunningRouter

from kvhearth.router.config import Discovery, HealthChecks, Limits, RouterConfig, Timeouts

TIMEOUTS = Timeouts(drain_seconds=0.2, sweep_seconds=0.02)
CHECKS = HealthChecks(interval_seconds=0.05, models_every=2)


def write(path, *engines: str) -> None:
    other = path.with_suffix(".new")
    other.write_text("engines: [" + ", ".join(engines) + "]")
    other.replace(path)


@pytest.fixture
def found(lab, tmp_path):
    """A router that finds its engines in a file."""

    def start(*engines: str, **options) -> RunningRouter:
        file = tmp_path / "engines.yaml"
        write(file, *engines)
        config = RouterConfig(
            discovery=Discovery(file=file),
            listen_port=0,
            policy="round-robin",
            timeouts=TIMEOUTS,
            health=CHECKS,
            **options,
        )
        router = RunningRouter(lab, config)
        lab.routers.append(router)
        return router

    return start


def entry(name: str, engine, more: str = "") -> str:
    return f"{{name: {name}, url: '{engine.url}'{more}}}"


def ask(router, model: str = "m") -> int:
    wire = router.wire()
    wire.prompt(model=model)
    status = wire.response()[0]
    wire.close()
    return status


def test_case_2_a_model_without_replicas_is_503_and_one_that_is_unknown_404(lab, found, tmp_path):
    engine = lab.engine()
    router = found(models=("declared",))
    assert [ask(router, model) for model in ("declared", "m")] == [503, 404]
    write(tmp_path / "engines.yaml", entry("a", engine))
    lab.until(lambda: router.metric("kvhearth_router_engines", state="healthy") == 1)
    assert [ask(router, model) for model in ("declared", "m", "other")] == [503, 200, 404]
    write(tmp_path / "engines.yaml")
    lab.until(lambda: router.metric("kvhearth_router_discovered_engines", source="file") == 0)
    wire = router.wire()
    wire.prompt()
    status, error = wire.error()
    assert (status, error["code"], error["headers"]["retry-after"]) == (503, "no_healthy_engine", "1")
    assert ask(router, "other") == 404


def test_case_1_an_engine_that_left_gets_no_traffic_though_it_still_answers(lab, found, tmp_path):
    stays, leaves = lab.engine(), lab.engine()
    router = found(entry("stays", stays), entry("leaves", leaves))
    write(tmp_path / "engines.yaml", entry("stays", stays))
    lab.until(lambda: router.metric("kvhearth_router_discovered_engines", source="file") == 1)
    before = len(leaves.requests)
    assert [ask(router) for _ in range(6)] == [200] * 6
    assert len(leaves.requests) == before
    lab.until(lambda: router.metric("kvhearth_router_engines", state="leaving") == 0)


def test_case_1_an_engine_with_a_new_address_is_asked_there_even_while_its_models_cannot_be_read(lab, found, tmp_path):
    old, new = lab.engine(), lab.engine()
    new.health_status = 503
    router = found(entry("a", old))
    assert ask(router) == 200
    write(tmp_path / "engines.yaml", entry("a", new))
    lab.until(lambda: new.probes)
    assert ask(router) == 503, "the old address is not asked any more"
    assert len(old.requests) == 1
    new.health_status = 200
    lab.until(lambda: router.metric("kvhearth_router_engines", state="healthy") == 1)
    assert (ask(router), len(new.requests)) == (200, 1)


def test_requests_in_flight_end_on_an_engine_that_left(lab, found, tmp_path):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = found(entry("a", engine))
    wire = router.wire()
    wire.prompt()
    lab.until(lambda: engine.serving == 1)
    write(tmp_path / "engines.yaml")
    lab.until(lambda: router.metric("kvhearth_router_engines", state="leaving") == 1)
    engine.let_go()
    assert wire.response()[0] == 200
    lab.until(lambda: router.metric("kvhearth_router_engines", state="leaving") == 0)


def test_an_engine_marked_as_draining_gets_nothing_new(lab, found, tmp_path):
    drains, other = lab.engine(), lab.engine()
    router = found(entry("drains", drains), entry("other", other))
    write(tmp_path / "engines.yaml", entry("drains", drains, ", draining: true"), entry("other", other))
    lab.until(lambda: router.metric("kvhearth_router_engines", state="draining") == 1)
    before = len(drains.requests)
    assert [ask(router) for _ in range(4)] == [200] * 4
    assert len(drains.requests) == before


def test_a_rolling_restart_with_drain_fails_no_request(lab, found, tmp_path):
    """Four engines, one after the other: drained, emptied, stopped, replaced at another port, under load."""
    engines = {f"e{number}": lab.engine() for number in range(4)}

    def say(draining: str = "") -> None:
        marks = [", draining: true" if name == draining else "" for name in engines]
        write(tmp_path / "engines.yaml", *[entry(n, e, m) for (n, e), m in zip(engines.items(), marks, strict=True)])

    router = found(*[entry(name, engine) for name, engine in engines.items()])
    statuses: list[int] = []
    stop = threading.Event()

    def load() -> None:
        wire = router.wire()
        while not stop.is_set():
            wire.prompt()
            statuses.append(wire.response()[0])

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for name in list(engines):
        old = engines[name]
        say(draining=name)
        lab.until(lambda: router.metric("kvhearth_router_engines", state="draining") == 1)
        lab.until(lambda name=name: router.metric("kvhearth_router_requests_in_flight", engine=name) == 0)
        engines[name] = lab.engine()
        old.die()
        say()
        lab.until(lambda: router.metric("kvhearth_router_engines", state="healthy") == 4)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert len(statuses) > 100
    assert set(statuses) == {200}


def test_another_configuration_is_obeyed_at_once_and_requests_go_on(lab):
    first, second = lab.engine(), lab.engine()
    first.behave = lab.gated(lab.reply())
    router = lab.router(first)
    wire = router.wire()
    wire.prompt()
    lab.until(lambda: first.serving == 1)
    changed = RouterConfig(
        engines=[("e1", second.url)],
        listen_port=0,
        policy="round-robin",
        aliases={"also": "m"},
        limits=Limits(max_body_bytes=100),
        timeouts=TIMEOUTS,
        health=CHECKS,
    )
    lab.router_loop.run(router.inner.reconfigure(changed))
    lab.until(lambda: router.metric("kvhearth_router_engines", state="healthy") == 1)
    assert ask(router, "also") == 200
    assert len(second.requests) == 1
    too_large = router.wire()
    too_large.prompt("x" * 200)
    assert too_large.error()[0] == 413
    first.let_go()
    assert wire.response()[0] == 200
