"""A stack with a real vLLM engine, as `kvhearth up` runs it: warmed, killed, back with its prompts from the store."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvhearth.connector.tiny_models import make_tiny_model
from kvhearth.control import LocalStack, State
from kvhearth.control.demo_vllm import stack_of_mode
from kvhearth.control.warm import Prompt, Target, Warmed, warm
from kvhearth.planner.workload import Segment
from kvhearth.stack import Stack

START_SECONDS = 300.0
PROMPT = Prompt(name="system", prompt=Segment(7, 300).text())


def one_engine(model: Path) -> Stack:
    """The demo's stack of mode shared with a single engine."""
    (pool,) = stack_of_mode("shared", sys.executable, model).pools
    offload = pool.offload.model_copy(update={"lookup_timeout_seconds": 10.0})
    pool = pool.model_copy(update={"replicas": 1, "offload": offload})
    return stack_of_mode("shared", sys.executable, model).model_copy(update={"pools": (pool,)})


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {START_SECONDS:.0f} s: {what}"
        time.sleep(0.2)


def warmed(running: LocalStack) -> Warmed:
    (done,) = warm([PROMPT], [Target(running.router_url, "tiny")])
    return done


def first_served(running: LocalStack) -> Warmed:
    """The first answer after the router has found that the engine is back."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        done = warmed(running)
        if done.error is None:
            return done
        assert "503" in done.error, done.error
        assert time.monotonic() < deadline, done.error
        time.sleep(0.2)


def regions(family: list[psutil.Process]) -> set[str]:
    """Names under /dev/shm of the DRAM tiers that processes have mapped."""
    maps = "".join(Path(f"/proc/{member.pid}/maps").read_text() for member in family if alive(member))
    return set(re.findall(r"/dev/shm/(vllm_offload\S+)", maps))


@pytest.mark.timeout(2 * int(START_SECONDS) + 60)
def test_a_killed_engine_comes_back_and_finds_what_was_warmed_in_the_store(tmp_path: Path) -> None:
    with LocalStack(one_engine(make_tiny_model("llama", tmp_path / "model")), tmp_path / "logs") as running:
        assert running.wait_ready()
        first, second = warmed(running), warmed(running)
        assert (first.error, second.error) == (None, None)
        assert first.prompt_tokens is not None
        assert not first.cached_tokens
        restorable = (first.prompt_tokens - 1) // 64 * 64
        assert second.cached_tokens is not None
        assert second.cached_tokens >= restorable

        pid = running.child("engine-0").pid
        assert pid is not None
        family = psutil.Process(pid).children(recursive=True)
        assert len(family) >= 3, "the guard, the engine core and its worker"
        mapped = regions(family)
        assert mapped
        os.kill(pid, signal.SIGKILL)
        wait(lambda: not any(alive(member) for member in family), "its processes gone")
        wait(lambda: running.child("engine-0").restarts == 1, "restarted")
        wait(lambda: running.child("engine-0").state is State.READY, "ready again")
        third = first_served(running)
        assert third.cached_tokens is not None
        assert third.cached_tokens >= restorable
        pid = running.child("engine-0").pid
        family = psutil.Process(pid).children(recursive=True)
        mapped |= regions(family)
    assert not any(alive(member) for member in family)
    assert mapped.isdisjoint(os.listdir("/dev/shm"))


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
