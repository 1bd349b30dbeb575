"""Parts die while load runs: no wrong answer, errors only where they cannot be helped, and it heals by itself."""

from __future__ import annotations

import os
import signal
import time

import httpx

from kvhearth.control import LocalStack
from kvhearth.planner.workload import Segment

from .conftest import MODEL, Load, independent

TIME_SCALE = 10.0
HEALS_WITHIN_SECONDS = 10.0


def kill(running: LocalStack, name: str) -> None:
    pid = running.child(name).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def begin(running: LocalStack, turns: int = 25) -> Load:
    load = Load(running.router_url, independent(users=12, turns=turns), TIME_SCALE)
    assert load.wait(lambda served: len(served) >= 40)
    assert load.errors == []
    return load


def answers(running: LocalStack, engine: str | None = None) -> bool:
    """A short request succeeds, at the router or at one engine."""
    url = running.engine_urls[engine] if engine else running.router_url
    prompt = Segment(time.monotonic_ns(), 64).text()  # new to everyone, so that the store is asked
    try:
        reply = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 2}, timeout=5)
    except httpx.TransportError:
        return False
    return reply.status_code == 200


def heals(running: LocalStack, engine: str | None = None) -> bool:
    deadline = time.monotonic() + HEALS_WITHIN_SECONDS
    while time.monotonic() < deadline:
        if answers(running, engine):
            return True
        time.sleep(0.1)
    return False


def test_killed_engine_fails_only_its_own_requests_and_comes_back(running: LocalStack) -> None:
    load = begin(running, turns=120)  # enough to go on until the engine is back, also on a slow machine
    kill(running, "engine-1")
    assert heals(running, "engine-1")
    since = len(load.served)
    assert load.wait(lambda served: any(s.engine == "engine-1" and not s.error for s in served[since:]))
    served = load.finish()
    assert len(served) == 12 * 120
    assert {failed.engine for failed in load.errors} <= {"engine-1"}
    assert not any("wrong text" in (failed.error or "") for failed in load.errors)
    assert len(load.errors) <= 12  # at most one request a user was on it


def test_killed_store_costs_no_request_and_fills_again(running: LocalStack) -> None:
    load = begin(running)
    kill(running, "store")
    served = load.finish()
    assert len(served) == 12 * 25
    assert load.errors == []
    state = httpx.get(f"{running.engine_urls['engine-0']}/emulator/state", timeout=5).json()
    assert state["store"]["wrong_bytes"] == 0
    deadline = time.monotonic() + HEALS_WITHIN_SECONDS
    while not httpx.get(f"{running.engine_urls['engine-0']}/emulator/state", timeout=5).json()["store"]["up"]:
        assert time.monotonic() < deadline
        assert answers(running, "engine-0")
        time.sleep(0.1)


def test_killed_router_resets_connections_and_the_next_request_succeeds(running: LocalStack) -> None:
    load = begin(running)
    kill(running, "router")
    assert heals(running)
    load.finish()
    assert load.errors  # its connections were reset, and those who tried again at once were refused
    assert all(failed.error and failed.error.startswith(("Client", "Server")) for failed in load.errors)
