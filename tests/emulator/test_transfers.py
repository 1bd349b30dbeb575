"""The engine learns of a transfer at its modelled time, or when the store has really answered if that is later."""

from __future__ import annotations

import pytest

from kvhearth.emulator.store_io import Reply
from kvhearth.emulator.transfers import EngineTransfers
from kvhearth.engine.links import ModelledLinks
from kvhearth.engine.ports import Job, JobDone, JobKind

RTT_NS = 100


class ScriptedStore:
    """Stands in for `StoreIo`: every reply stays open until the test answers it."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def _ask(self, keys) -> Reply:
        self.replies.append(Reply())
        return self.replies[-1]

    match = fetch = put = _ask

    def answer(self, at_ns: int, count: int) -> None:
        reply = self.replies.pop(0)
        reply.count = count
        reply.at_ns = at_ns


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def jobs() -> list[tuple[int, int]]:
    return []


@pytest.fixture
def port(store: ScriptedStore, jobs: list[tuple[int, int]]) -> EngineTransfers:
    links = ModelledLinks(lambda n: n, lambda n: n, lambda n: RTT_NS + n, RTT_NS)
    return EngineTransfers(links, store, lambda job, duration: jobs.append((job.job_id, duration)))


def finished(port: EngineTransfers, now_ns: int) -> list[JobDone]:
    port.begin_step(now_ns)
    return list(port.finished())


def test_a_load_is_done_at_its_modelled_time_and_reported_once(port, jobs) -> None:
    port.begin_step(0)
    port.start(Job(1, JobKind.LOAD, (7, 8), 1000))
    assert port.next_event_ns() == 1000
    assert finished(port, 999) == []
    assert finished(port, 1000) == [JobDone(1, 2)]
    assert finished(port, 2000) == []
    assert port.next_event_ns() is None
    assert jobs == [(1, 1000)]


def test_a_fetch_that_is_really_there_sooner_takes_its_modelled_time(port, store) -> None:
    port.begin_step(0)
    port.start(Job(1, JobKind.FETCH, (7, 8), 1000))
    store.answer(at_ns=50, count=2)
    assert finished(port, 1099) == []
    assert finished(port, 1100) == [JobDone(1, 2)]
    assert port.store_lag_ns == 0


def test_a_fetch_that_is_really_there_later_is_waited_for_and_counted_as_lag(port, store) -> None:
    port.begin_step(0)
    port.start(Job(1, JobKind.FETCH, (7, 8), 1000))
    assert finished(port, 1500) == []
    assert port.next_event_ns() is None
    store.answer(at_ns=1700, count=1)
    assert port.next_event_ns() == 1700
    assert finished(port, 1699) == []
    assert finished(port, 1700) == [JobDone(1, 1)]
    assert port.store_lag_ns == 600


def test_jobs_are_reported_in_the_order_in_which_they_ended(port, store) -> None:
    port.begin_step(0)
    port.start(Job(1, JobKind.FETCH, (1,), 10))
    port.start(Job(2, JobKind.LOAD, (2,), 500))
    port.start(Job(3, JobKind.SAVE, (3,), 400))
    store.answer(at_ns=900, count=1)
    assert [done.job_id for done in finished(port, 1000)] == [3, 2, 1]


def test_a_lookup_is_answered_after_the_round_trip_and_stays_answered(port, store) -> None:
    port.begin_step(0)
    assert port.lookup("r", (1, 2, 3)) is None
    assert port.lookup("r", (1, 2, 3)) is None
    assert len(store.replies) == 1
    store.answer(at_ns=10, count=2)
    port.begin_step(RTT_NS - 1)
    assert port.lookup("r", (1, 2, 3)) is None
    assert port.next_event_ns() == RTT_NS
    port.begin_step(RTT_NS)
    assert port.lookup("r", (1, 2, 3)) == 2
    assert port.lookup("r", (1, 2, 3)) == 2
    assert port.next_event_ns() is None


def test_other_keys_or_a_forgotten_request_ask_the_store_again(port, store) -> None:
    port.begin_step(0)
    port.lookup("r", (1, 2))
    store.answer(at_ns=0, count=2)
    port.begin_step(RTT_NS)
    assert port.lookup("r", (1, 2)) == 2
    assert port.lookup("r", (2,)) is None
    store.answer(at_ns=0, count=1)
    port.begin_step(2 * RTT_NS)
    assert port.lookup("r", (2,)) == 1
    port.forget("r")
    assert port.lookup("r", (2,)) is None
    assert len(store.replies) == 1


def test_without_a_store_nothing_is_found() -> None:
    port = EngineTransfers(ModelledLinks(lambda n: n, lambda n: n, lambda n: n, 0), None, lambda job, duration: None)
    assert port.lookup("r", (1, 2)) == 0
