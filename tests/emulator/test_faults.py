"""Faults happen when asked for, to what was asked for, and end when told to."""

from __future__ import annotations

import collections

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvhearth.emulator.faults import Faults
from kvhearth.emulator.faulty import FaultsEndpoint
from kvhearth.emulator.protocol import ApiError
from kvhearth.emulator.publisher import EventPublisher, KvEventsConfig
from kvhearth.emulator.wire import AllBlocksCleared

BODY = {"model": "llama-3.1-8b", "prompt": "word " * 64, "max_tokens": 8}


def fault(engine, **values) -> dict[str, object]:
    response = engine.http.post("/emulator/faults", json=values)
    assert response.status_code == 200, response.text
    state: dict[str, object] = response.json()
    return state


def test_nothing_goes_wrong_until_asked_for_and_all_ends_with_delete(start) -> None:
    engine = start()
    before = engine.http.get("/emulator/faults").json()
    assert not any(before["happened"].values())
    fault(engine, error_rate=1.0, slow_ms=1, stale_metrics=True)
    assert engine.http.post("/v1/completions", json=BODY).status_code == 503
    assert engine.http.delete("/emulator/faults").json()["faults"] == before["faults"]
    assert engine.http.post("/v1/completions", json=BODY).status_code == 200


def test_a_fault_leaves_those_set_before_as_they_were(start) -> None:
    engine = start()
    fault(engine, error_status=502)
    assert fault(engine, error_rate=0.5)["faults"]["error_status"] == 502


def test_a_share_of_requests_fails_with_the_status_asked_for(start) -> None:
    engine = start()
    fault(engine, error_rate=0.5, error_status=500, seed=7)
    statuses = [engine.http.post("/v1/completions", json=BODY).status_code for _ in range(40)]
    assert {200, 500} == set(statuses)
    assert engine.metric("kvhearth_emulator_faults_total", fault="error_rate") == statuses.count(500)
    assert engine.http.get("/health").status_code == 200


def test_a_hanging_engine_still_looks_healthy_unless_everything_hangs(start) -> None:
    engine = start()
    fault(engine, hang="requests")
    with pytest.raises(httpx.ReadTimeout):
        engine.http.post("/v1/completions", json=BODY, timeout=0.2)
    assert engine.http.get("/health").status_code == 200
    fault(engine, hang="everything")
    with pytest.raises(httpx.ReadTimeout):
        engine.http.get("/health", timeout=0.2)
    assert engine.http.delete("/emulator/faults").json()["happened"]["hang"] == 2
    engine.complete("word")


@pytest.mark.parametrize(("stream", "pieces"), [(True, 0), (True, 2), (False, 1)])
def test_a_cut_answer_breaks_off_in_the_middle_and_leaves_nothing_running(
    start, eventually, stream: bool, pieces: int
) -> None:
    engine = start(time_scale=1.0)
    fault(engine, abort_rate=1.0, abort_after_pieces=pieces)
    heard = bytearray()
    with engine.http.stream("POST", "/v1/completions", json={**BODY, "stream": stream}) as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            collections.deque(map(heard.extend, response.iter_raw()), maxlen=0)
    if stream:
        assert heard.count(b"data: ") == pieces
    else:
        assert heard.startswith(b'{"id"')
    eventually(lambda: engine.state()["running"] == 0)


def test_a_slow_engine_takes_at_least_as_long_as_asked_for(start) -> None:
    engine = start()
    fault(engine, slow_ms=300)
    assert engine.http.post("/v1/completions", json=BODY).elapsed.total_seconds() >= 0.3


def test_stale_metrics_stand_still_and_then_go_on(start) -> None:
    engine = start()
    engine.complete("one")
    fault(engine, stale_metrics=True)
    engine.complete("two")
    assert engine.metric("vllm:request_success_total", finished_reason="length") == 1
    fault(engine, stale_metrics=False)
    assert engine.metric("vllm:request_success_total", finished_reason="length") == 2


def test_a_restart_fails_open_requests_and_empties_the_cache(start, eventually) -> None:
    events = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0")
    engine = start(time_scale=1.0, kv_events=events)
    prompt = "word " * 100
    engine.complete(prompt)
    with engine.http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 5000, "stream": True}) as response:
        eventually(lambda: engine.state()["running"] == 1)
        fault(engine, restart=True)
        assert "the engine restarted" in response.read().decode()
    assert engine.state()["counters"]["requests_finished"] == 0
    assert engine.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert engine.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert engine.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "values",
    [
        {"unknown": 1},
        {"error_rate": 1.5},
        {"error_rate": "often"},
        {"error_status": 404},
        {"slow_ms": -1},
        {"abort_after_pieces": -1},
        {"hang": "sometimes"},
        {"restart": 1},
    ],
)
def test_what_is_no_fault_is_refused_and_changes_nothing(engine, values: dict[str, object]) -> None:
    before = engine.http.get("/emulator/faults").json()
    response = engine.http.post("/emulator/faults", json={"slow_ms": 5, **values})
    assert response.status_code == 400
    assert next(iter(values)) in response.json()["error"]["message"]
    assert engine.http.get("/emulator/faults").json() == before


def test_the_key_guards_faults_too(start) -> None:
    engine = start(api_key="secret")
    assert engine.http.post("/emulator/faults", json={"hang": "everything"}).status_code == 401
    assert engine.http.get("/health").status_code == 200


class Sent:
    """Sequence numbers that a publisher sends with some faults, of those it was given."""

    def __init__(self, count: int, **faults: object) -> None:
        self.numbers: list[int] = []
        settings = Faults()
        settings.change(faults)
        config = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0")
        self.publisher = EventPublisher(config, 0, "127.0.0.1", settings)
        self.publisher._send = lambda message: self.numbers.append(int.from_bytes(message[1], "big"))
        for _ in range(count):
            self.publisher.publish([AllBlocksCleared()])


async def test_events_can_be_lost_doubled_and_out_of_order_by_share() -> None:
    kept = Sent(200, drop_events=0.3)
    assert kept.numbers == sorted(set(kept.numbers))
    assert 100 < len(kept.numbers) < 180
    doubled = Sent(200, duplicate_events=0.3)
    assert sorted(set(doubled.numbers)) == list(range(200))
    assert 220 < len(doubled.numbers) < 300
    late = Sent(200, reorder_events=1.0)
    assert late.numbers == [number ^ 1 for number in range(200)]
    for sent in (kept, doubled, late):
        await sent.publisher.close()


async def test_after_a_restart_numbers_begin_again() -> None:
    sent = Sent(3)
    sent.publisher.restart()
    sent.publisher.publish([AllBlocksCleared()])
    assert sent.numbers == [0, 1, 2, 0]
    await sent.publisher.close()


@pytest.mark.parametrize(
    ("client", "status"), [("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200), ("10.0.0.7", 403), ("", 403)]
)
async def test_faults_are_set_from_this_machine_only(client: str, status: int) -> None:
    endpoint = FaultsEndpoint(Faults(), restart=lambda: None, on_change=lambda: None)
    app = Starlette(routes=[Route("/", endpoint.__call__)], exception_handlers={ApiError: _refused})
    transport = httpx.ASGITransport(app, client=(client, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        assert (await http.get("/")).status_code == status


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(status_code=error.status)
