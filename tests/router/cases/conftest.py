"""Emulated engines that publish KV events over real sockets, in threads of the test, behind a router."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import httpx
import pytest

from kvhearth.emulator.config import EmulatorConfig
from kvhearth.emulator.publisher import KvEventsConfig
from kvhearth.emulator.serve import Emulator
from kvhearth.router.config import EventSource, KvSettings

WAIT_SECONDS = 20.0


class EmulatedEngine:
    """An engine that computes nothing and says everything: vLLM's API and its KV events."""

    def __init__(self, **settings) -> None:
        events = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
        defaults = {"model": "llama-3.1-8b", "served_model_name": "m", "num_gpu_blocks_override": 1025}
        self.emulator = Emulator(
            EmulatorConfig(**{**defaults, "port": 0, "time_scale": 200.0, "kv_events": events, **settings})
        )
        ready = threading.Event()
        self.thread = threading.Thread(target=self.emulator.run, args=(ready.set,), daemon=True)
        self.thread.start()
        assert ready.wait(WAIT_SECONDS)
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_SECONDS, verify=False)
        at = self.kv_events()
        events_port, replay_port = (at[name].rpartition(":")[2] for name in ("endpoint", "replay_endpoint"))
        self.source = EventSource(f"tcp://127.0.0.1:{events_port}", f"tcp://127.0.0.1:{replay_port}")

    @property
    def url(self) -> str:
        return self.emulator.url

    def faults(self, **fields) -> None:
        assert self.http.post("/emulator/faults", json=fields).status_code == 200

    def compute(self, ids: list[int]) -> None:
        """Somebody asks this engine past the router."""
        answer = self.http.post("/v1/completions", json={"model": "m", "prompt": ids, "max_tokens": 1})
        assert answer.status_code == 200, answer.text

    def kv_events(self) -> dict:
        """Where it publishes, and how many batches so far."""
        return self.http.get("/emulator/state").json()["kv_events"]

    def stop(self) -> None:
        self.http.close()
        self.emulator.stop()
        self.thread.join(WAIT_SECONDS)
        assert not self.thread.is_alive()


class Emulated:
    """Emulated engines e0, e1, … behind a kv-aware router."""

    def __init__(self, lab, engines: list[EmulatedEngine], **options) -> None:
        self.lab = lab
        self.engines = engines
        events = {f"e{number}": engine.source for number, engine in enumerate(engines)}
        options.setdefault("policy", "kv-aware")
        self.router = lab.router(*engines, kv=KvSettings(events=events), **options)

    def until_all_told(self) -> None:
        """Until the router has heard every batch of events that the engines have published."""

        for number, engine in enumerate(self.engines):
            told = engine.kv_events()["batches"]

            def heard(source: str = f"e{number}", told: int = told) -> bool:
                return self.router.metric("kvhearth_router_feed_batches_total", source=source) >= told

            self.lab.until(heard, "the router has heard all")
        self.after_a_sweep()

    def after_a_sweep(self) -> None:
        """The size of blocks that events tell is taken over at each sweep. Timers of one loop fire in order."""
        self.lab.router_loop.run(asyncio.sleep(3 * self.router.config.timeouts.sweep_seconds))


@pytest.fixture
def emulate(lab) -> Iterator:
    """Starts emulated engines behind a router; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(count: int = 2, *, options: dict | None = None, **settings) -> Emulated:
            engines = [EmulatedEngine(**settings) for _ in range(count)]
            for engine in engines:
                stack.callback(engine.stop)
            return Emulated(lab, engines, **options or {})

        yield start


@pytest.fixture
def emulated(emulate) -> Emulated:
    return emulate()


@pytest.fixture
def kv_nobody() -> KvSettings:
    """KV events from an address where nobody is."""
    return KvSettings(events={"e0": EventSource("tcp://127.0.0.1:1")})
