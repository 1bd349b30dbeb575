"""A real stack of small emulated engines, and load on it from a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvhearth.control import LocalStack
from kvhearth.planner.load import LoadConfig, LoadRun, play
from kvhearth.planner.outcome import Served
from kvhearth.planner.workload import Segment, Turn, User, Workload
from kvhearth.stack import Emulator, Offload, Pool, Router, Stack, Store

MODEL = "Llama-3.1-8B"


def small_stack(mode: str = "shared", replicas: int = 2, policy: str = "prefix", time_scale: float = 10.0) -> Stack:
    """Engines with 512 blocks of HBM each."""
    pool = Pool(
        name="engine",
        model=MODEL,
        replicas=replicas,
        num_gpu_blocks_override=513,
        offload=Offload.model_validate({"mode": mode, "dram_size": 1 << 30}),
        emulator=Emulator(time_scale=time_scale, stream_interval=4, store_bytes_scale=1024),
    )
    router = Router.model_validate({"listen": "127.0.0.1:0", "policy": policy})
    return Stack(name="e2e", pools=(pool,), store=Store(size=32 << 20) if mode == "shared" else None, router=router)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[LocalStack]:
    """Two engines, a store and a router, all ready."""
    with LocalStack(small_stack(policy="round-robin"), tmp_path) as stack:
        assert stack.wait_ready()
        yield stack


def independent(users: int, turns: int) -> Workload:
    """Requests that share a system prompt and are otherwise on their own, so that one's failure is not another's."""
    system = Segment(1, 512)
    return Workload(
        "independent",
        tuple(
            User(
                f"user-{u}",
                "t",
                u * 100_000_000,
                tuple(Turn((system, Segment(1000 + 100 * u + t, 200)), 40, 300_000_000) for t in range(turns)),
            )
            for u in range(users)
        ),
    )


class Load:
    """A workload played from a thread; every text that comes back is checked."""

    def __init__(self, url: str, workload: Workload, time_scale: float) -> None:
        self.served: list[Served] = []
        self._news = threading.Condition()
        self._workload = workload
        self._config = LoadConfig(url, MODEL, time_scale, request_timeout_seconds=30, check_text=True)
        self._thread = threading.Thread(target=self._play)
        self._thread.start()

    def _play(self) -> LoadRun:
        return asyncio.run(play(self._workload, self._config, self._note))

    def _note(self, served: Served) -> None:
        with self._news:
            self.served.append(served)
            self._news.notify_all()

    def wait(self, until: Callable[[list[Served]], bool], seconds: float = 30.0) -> bool:
        """Wait until what was served so far fulfils a condition."""
        with self._news:
            return self._news.wait_for(lambda: until(self.served), seconds)

    def finish(self) -> list[Served]:
        """Everything that was served."""
        self._thread.join(90)
        assert not self._thread.is_alive()
        return self.served

    @property
    def errors(self) -> list[Served]:
        """What failed."""
        return [served for served in self.served if served.error is not None]
