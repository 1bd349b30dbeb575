"""A configuration file goes from valid to broken to valid again: the router serves on, with every option it had."""

from __future__ import annotations

import pytest
from tests.router.conftest import RunningRouter

from kvhearth.router.settings import read_router_settings

COMMON = """
listen: 127.0.0.1:0
policy: round-robin
health: {interval_seconds: 0.05, models_every: 2}
timeouts: {drain_seconds: 0.2, sweep_seconds: 0.02}
aliases: {also: m}
"""


class Configured:
    """A router that follows a file."""

    def __init__(self, lab, folder) -> None:
        self.lab = lab
        self.file = folder / "router.yaml"

    def write(self, text: str) -> None:
        other = self.file.with_suffix(".new")
        other.write_text(text)
        other.replace(self.file)

    def start(self) -> RunningRouter:
        def read():
            return read_router_settings({}, {}, self.file)

        router = RunningRouter(self.lab, read(), reread=read, config_file=self.file)
        self.lab.routers.append(router)
        return router


def engines(*found) -> str:
    listed = ", ".join(f"{{name: e{number}, url: '{engine.url}'}}" for number, engine in enumerate(found))
    return f"{COMMON}engines: [{listed}]\n"


def post(router, model: str = "also", prompt: str = "x") -> int:
    wire = router.wire()
    wire.prompt(prompt, model)
    status = wire.response()[0]
    wire.close()
    return status


@pytest.fixture
def configured(lab, tmp_path) -> Configured:
    return Configured(lab, tmp_path)


@pytest.mark.parametrize("broken", ["engines: [", "engines: []\n", "limts: {}\n", "timeouts: {connect_seconds: -1}\n"])
def test_a_broken_file_changes_nothing_and_the_next_good_one_counts(lab, configured, broken):
    first, second = lab.engine(), lab.engine()
    configured.write(engines(first))
    router = configured.start()
    reloader = router.inner.reloader
    assert post(router) == 200
    configured.write(broken)
    lab.until(lambda: reloader.failures == 1, "the broken file was looked at")
    assert reloader.last_error
    assert router.metric("kvhearth_router_config_failures_total") == 1
    assert router.metric("kvhearth_router_config_generation") == 1
    probes = first.probes
    lab.until(lambda: first.probes > probes + 3, "health checks go on")
    assert post(router) == 200
    configured.write(engines(first, second) + "limits: {max_body_bytes: 100}\n")
    lab.until(lambda: router.metric("kvhearth_router_engines", state="healthy") == 2)
    assert [post(router) for _ in range(4)] == [200] * 4, "the alias is kept"
    assert len(second.requests) == 2
    assert post(router, prompt="x" * 200) == 413
    assert reloader.last_error == ""
    assert router.metric("kvhearth_router_config_generation") == 2


def test_an_engine_that_a_new_file_leaves_out_ends_what_it_has(lab, configured):
    first, second = lab.engine(), lab.engine()
    first.behave = lab.gated(lab.reply())
    configured.write(engines(first))
    router = configured.start()
    wire = router.wire()
    wire.prompt()
    lab.until(lambda: first.serving == 1)
    configured.write(engines(second).replace("e0", "e9"))
    lab.until(lambda: router.metric("kvhearth_router_engines", state="leaving") == 1)
    lab.until(lambda: router.metric("kvhearth_router_engines", state="healthy") == 1)
    assert post(router) == 200
    assert len(second.requests) == 1
    first.let_go()
    assert wire.response()[0] == 200


def test_a_change_that_needs_a_restart_is_refused_as_a_whole(lab, configured):
    first, second = lab.engine(), lab.engine()
    configured.write(engines(first))
    router = configured.start()
    configured.write(engines(first, second).replace("round-robin", "random"))
    lab.until(lambda: router.inner.reloader.failures == 1)
    assert "policy cannot change while the router runs" in router.inner.reloader.last_error
    assert router.metric("kvhearth_router_engines", state="healthy") == 1
    assert post(router) == 200
