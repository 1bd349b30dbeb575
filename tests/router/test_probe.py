"""How engines are found to be up, down, slow or strange."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
from unittest.mock import Mock

import pytest

from kvhearth.router.config import HealthChecks, Limits, Resilience
from kvhearth.router.discovery.member import Member
from kvhearth.router.fleet import Fleet
from kvhearth.router.probe import LoadProbe, Probe, ProbeFailed, read_load

CHECKS = HealthChecks(interval_seconds=1000, deadline_seconds=0.2, failures_to_down=3, models_every=2)


def fleet_of(url: str, ranks: int = 1, watcher: Mock | None = None) -> Fleet:
    fleet = Fleet(Limits(), Resilience(), watcher or Mock())
    fleet.update([Member("e0", url, ranks)])
    return fleet


class Watched:
    """One engine, its probe, and what the router was told."""

    def __init__(self, lab, engine, checks: HealthChecks = CHECKS) -> None:
        self.lab = lab
        self.told = Mock()
        self.fleet = fleet_of(engine.url, watcher=self.told)
        self.engine = self.fleet.engines[0]
        self.probe = Probe(self.engine, self.fleet, checks, None)

    @property
    def gone(self) -> list[str]:
        return [call.args[0].name for call in self.told.target_lost.call_args_list]

    def check(self) -> bool:
        self.lab.engines_loop.run(self.probe.check())
        return self.engine.healthy


def test_an_engine_is_up_once_it_answers_and_its_models_are_known(lab):
    watched = Watched(lab, lab.engine("a", "b"))
    assert watched.fleet.serving("a") is None
    assert not watched.fleet.fully_known()
    assert watched.check()
    assert watched.fleet.serving("a") == watched.engine.targets
    assert watched.fleet.models() == ["a", "b"] or set(watched.fleet.models()) == {"a", "b"}
    assert watched.fleet.fully_known()


def test_an_engine_that_is_not_ready_is_down_but_keeps_its_cache(lab):
    engine = lab.engine()
    watched = Watched(lab, engine)
    assert watched.check()
    engine.health_status = 503
    assert not watched.check()
    assert watched.fleet.serving("m") == []
    assert watched.gone == []


def test_an_engine_that_is_gone_is_down_at_once_and_its_cache_with_it(lab):
    engine = lab.engine()
    watched = Watched(lab, engine)
    assert watched.check()
    engine.die()
    assert not watched.check()
    assert watched.gone == ["e0"]
    engine.start()
    assert watched.check()


def test_one_late_answer_is_forgiven_and_three_in_a_row_are_not(lab):
    engine = lab.engine()
    watched = Watched(lab, engine)
    assert watched.check()
    engine.health_delay_seconds = 0.5
    assert watched.check()
    assert watched.check()
    engine.health_delay_seconds = 0
    assert watched.check()
    engine.health_delay_seconds = 0.5
    assert [watched.check() for _ in range(3)] == [True, True, False]
    assert watched.gone == ["e0"]


def test_models_that_come_and_go_are_noticed(lab):
    engine = lab.engine("base")
    watched = Watched(lab, engine)
    assert watched.check()
    engine.models = ("base", "adapter")
    for _ in range(2):
        watched.check()
    assert watched.fleet.serving("adapter") == watched.engine.targets


@pytest.mark.parametrize("page", [b"", b"{}", b'{"data": [{"id": 5}]}', b'{"data": 3}', b"[]", b"\xff", b"[" * 100_000])
def test_a_page_that_is_not_a_list_of_models_leaves_the_engine_down(lab, page, monkeypatch):
    watched = Watched(lab, lab.engine())
    real = watched.probe._get

    async def get(path: bytes) -> bytes:
        return page if path == b"/v1/models" else await real(path)

    monkeypatch.setattr(watched.probe, "_get", get)
    assert not watched.check()


def test_an_answer_without_end_is_given_up(lab):
    async def endless(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nX: ")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"a" * 65536)
                await writer.drain()

    async def read():
        server = await asyncio.start_server(endless, "127.0.0.1", 0)
        async with server:
            fleet = fleet_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            checks = dataclasses.replace(CHECKS, deadline_seconds=8)
            with pytest.raises(ProbeFailed, match="answer above"):
                await Probe(fleet.engines[0], fleet, checks, None)._get(b"/health")

    lab.engines_loop.run(read())


def test_the_cards_of_models_are_kept_as_they_are(lab):
    engine = lab.engine("a")
    router = lab.router(engine)
    status, _, body = router.wire().get("/v1/models")
    assert (status, json.loads(body)["data"]) == (200, [{"id": "a"}])


# An engine's own load

PAGE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1e1
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99
"""


def test_load_is_read_for_each_rank():
    assert read_load(PAGE) == {"0": (3, 2), "1": (5, 10)}
    assert read_load(b"vllm:num_requests_running 4\n") == {"0": (4, 0)}
    assert read_load(b'vllm:num_requests_running{model_name="a"} NaN\nvllm:num_requests_waiting 1\n') == {"0": (0, 1)}
    for page in (b"", b"# nothing\n", b"vllm:num_requests_running_total 4\n"):
        with pytest.raises(ProbeFailed, match="num_requests_running"):
            read_load(page)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engines_own_load_is_seen_until_it_tells_no_more(lab, ranks):
    scripted = lab.engine()
    scripted.page = PAGE
    fleet = fleet_of(scripted.url, ranks)
    [engine], failed = fleet.engines, []
    probe = LoadProbe(engine, fleet, CHECKS, None, 8, failed.append)
    lab.engines_loop.run(probe.read())
    views = [target.view() for target in engine.targets]
    assert [(view.running, view.waiting) for view in views] == ([(8, 12)] if ranks == 1 else [(3, 2), (5, 10)])
    scripted.health_status = 500
    for _ in range(CHECKS.failures_to_down):
        assert engine.targets[0].view().running
        lab.engines_loop.run(probe.read())
    assert failed == ["e0"] * CHECKS.failures_to_down
    assert [target.view().running for target in engine.targets] == [0] * ranks


def test_an_engine_that_reports_a_queue_counts_as_full(lab):
    scripted = lab.engine()
    scripted.page = PAGE
    fleet = fleet_of(scripted.url)
    [engine] = fleet.engines
    for _ in range(20):
        engine.targets[0].load(1, 0)
    lab.engines_loop.run(LoadProbe(engine, fleet, CHECKS, None, 8, print).read())
    assert engine.capacity.most == 16, "twelve wait there, and eight may"


def test_an_engine_is_looked_at_again_after_a_look_that_failed(lab, monkeypatch, caplog):
    engine = lab.engine()
    watched = Watched(lab, engine, dataclasses.replace(CHECKS, interval_seconds=0.02))

    def fail(*told, **more):
        monkeypatch.undo()
        raise ZeroDivisionError

    monkeypatch.setattr(watched.fleet, "mark_up", fail)
    watch = asyncio.run_coroutine_threadsafe(watched.probe.watch(), lab.engines_loop.loop)
    lab.until(lambda: watched.engine.healthy)
    watch.cancel()
    assert "ZeroDivisionError" in caplog.text


def test_a_router_out_of_descriptors_takes_no_engine_for_dead(lab, monkeypatch, caplog):
    watched = Watched(lab, lab.engine())
    assert watched.check()

    async def fail(*address, ssl):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as exhausted:
        exhausted.setattr(asyncio, "open_connection", fail)
        for _ in range(CHECKS.failures_to_down + 1):
            assert watched.check()
    assert watched.gone == []
    assert sum("Too many open files" in record.message for record in caplog.records) == 1
    assert watched.check()
