"""Emulated engines on free ports, in threads of the test process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from kvhearth.emulator.config import EmulatorConfig
from kvhearth.emulator.serve import Emulator
from kvhearth.metrics import parse_exposition

MODEL = "llama-3.1-8b"
DEADLINE_SECONDS = 20.0


class Running(NamedTuple):
    """An emulated engine that answers, and a client for it."""

    emulator: Emulator
    http: httpx.Client

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """Post to /v1/completions; the answer must be a success."""
        response = self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 4, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def state(self) -> dict[str, Any]:
        """What /emulator/state says."""
        state: dict[str, Any] = self.http.get("/emulator/state").json()
        return state

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics, by its exposed name and some of its labels."""
        page = parse_exposition(self.http.get("/metrics").text)
        found = [value for key, value in page[name].items() if labels.items() <= dict(key).items()]
        assert len(found) == 1, (name, labels, page[name])
        return found[0]


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines; they end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(**settings))


@pytest.fixture(scope="module")
def engine() -> Iterator[Running]:
    """One quick engine in mode none, for a module's tests that leave no trace."""
    with running(time_scale=100.0) as made:
        yield made


@contextlib.contextmanager
def running(**settings: Any) -> Iterator[Running]:
    """An engine with 1,000 KV blocks, unless told otherwise."""
    defaults: dict[str, Any] = {"model": MODEL, "port": 0, "num_gpu_blocks_override": 1001, "time_scale": 20.0}
    emulator = Emulator(EmulatorConfig(**{**defaults, **settings}))
    ready = threading.Event()
    thread = threading.Thread(target=emulator.run, args=(ready.set,))
    thread.start()
    try:
        assert ready.wait(DEADLINE_SECONDS)
        with httpx.Client(base_url=emulator.url, timeout=DEADLINE_SECONDS) as http:
            yield Running(emulator, http)
    finally:
        emulator.stop()
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until something is so, or fails."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "it did not come about in time"
            time.sleep(0.01)

    return wait
