"""Whoever answers the engine's port, planner or emulator: a flush takes as long as its saves, and loads wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pytest

from kvhearth.emulator.transfers import EngineTransfers
from kvhearth.engine.links import ModelledLinks
from kvhearth.engine.ports import Job, JobDone, JobKind, Transfers
from kvhearth.planner.virtual import VirtualStore, VirtualTransfers


class Port(Protocol):
    """A port, and how to move its clock."""

    transfers: Transfers

    def at(self, now_ns: int) -> None: ...


class Virtual:
    def __init__(self, links: ModelledLinks) -> None:
        self.transfers = VirtualTransfers(links, VirtualStore(10))

    def at(self, now_ns: int) -> None:
        self.transfers.now_ns = now_ns


class Emulated:
    def __init__(self, links: ModelledLinks) -> None:
        self.transfers = EngineTransfers(links, None, lambda job, duration_ns: None)

    def at(self, now_ns: int) -> None:
        self.transfers.begin_step(now_ns)


@pytest.fixture(params=[Virtual, Emulated])
def port(request: pytest.FixtureRequest) -> Port:
    made: Callable[[ModelledLinks], Port] = request.param
    return made(ModelledLinks(lambda nbytes: nbytes, lambda nbytes: 10 * nbytes, lambda nbytes: nbytes, 0))


def finished(port: Port, now_ns: int) -> Sequence[JobDone]:
    port.at(now_ns)
    return list(port.transfers.finished())


def test_a_flush_takes_until_its_last_save_is_over_and_loads_begin_after_it(port: Port) -> None:
    port.at(0)
    for job_id in (1, 2, 3):
        port.transfers.start(Job(job_id, JobKind.SAVE, (job_id,), 10))
    port.at(50)
    assert port.transfers.flush([1, 2]) == 150
    port.transfers.start(Job(4, JobKind.LOAD, (9,), 5))
    assert finished(port, 200) == [JobDone(1, 1), JobDone(2, 1)]
    assert finished(port, 204) == []
    assert finished(port, 205) == [JobDone(4, 1)]
    port.transfers.start(Job(5, JobKind.LOAD, (9,), 5))  # a later step's load waits for nothing
    assert finished(port, 210) == [JobDone(5, 1)]
    assert finished(port, 300) == [JobDone(3, 1)]


def test_a_flush_of_what_is_just_over_takes_no_time(port: Port) -> None:
    port.at(0)
    port.transfers.start(Job(1, JobKind.SAVE, (1,), 10))
    port.at(100)
    assert port.transfers.flush([1]) == 0
