"""`kvhearth up` as a user runs it: a process at a terminal, requests over HTTP, kills, Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import redis

STACK = """
pools:
  - name: chat
    model: Llama-3.1-8B
    replicas: 2
    max_model_len: 8192
    num_gpu_blocks_override: 1024
    offload: {mode: shared, dram_size: 1GiB, blocks_per_chunk: 16}
    emulator: {time_scale: 100}
store: {size: 16MiB}
router: {listen: "127.0.0.1:0", policy: round-robin}
"""


def eventually(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


class Up:
    """A running `kvhearth up`, what it printed, and the processes under it."""

    def __init__(self, text: str, directory: Path, runtime_dir: Path) -> None:
        self.file = directory / "stack.yaml"
        self.file.write_text(text)
        self._output = directory / "output"
        with self._output.open("w") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvhearth", "up", str(self.file)],
                stdout=sink,
                stderr=sink,
                env={**os.environ, "XDG_RUNTIME_DIR": str(runtime_dir)},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_ready(self) -> None:
        eventually(lambda: "Ctrl-C stops" in self.output or self.process.poll() is not None, "ready", 60)
        assert self.process.poll() is None, self.output

    def url(self, child: str) -> str:
        found = re.search(rf"^ {child} +(http://\S+)", self.output, re.MULTILINE)
        assert found, self.output
        return found[1]

    def children(self) -> dict[str, psutil.Process]:
        """Verb or engine name → process."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            words = process.cmdline()
            if "serve" in words:
                name = (
                    words[words.index("--engine-id") + 1] if "--engine-id" in words else words[words.index("serve") - 1]
                )
                found[name] = process
        return found

    def complete(self, child: str = "router") -> bool:
        body = {"model": "Llama-3.1-8B", "prompt": "Hello", "max_tokens": 4}
        try:
            answer = httpx.post(f"{self.url(child)}/v1/completions", json=body, timeout=10)
        except httpx.TransportError:
            return False
        return answer.status_code == 200 and bool(answer.json()["choices"][0]["text"])


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvh"))  # short: unix sockets go into it
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(tmp_path: Path, runtime_dir: Path) -> Iterator[Callable[[str], Up]]:
    started: list[Up] = []

    def run(text: str) -> Up:
        started.append(Up(text, tmp_path, runtime_dir))
        return started[-1]

    yield run
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
        up.process.wait()


def family(up: Up) -> list[psutil.Process]:
    return psutil.Process(up.process.pid).children(recursive=True)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "kvh" in name}


def test_what_is_killed_comes_back_where_it_was_and_ctrl_c_leaves_nothing(
    start: Callable[[str], Up], runtime_dir: Path
) -> None:
    shared_before = shared_memory()
    up = start(STACK)
    up.wait_ready()
    assert up.complete()
    assert set(up.children()) == {"store", "chat-0", "chat-1", "router"}

    for name in ("chat-0", "router"):
        victim = up.children()[name]
        victim.kill()
        eventually(lambda name=name: up.complete(name), f"{name} answers at its old address")
        assert up.children()[name].pid != victim.pid

    victim = up.children()["store"]
    found = re.search(r"^ store +127\.0\.0\.1:(\d+)", up.output, re.MULTILINE)
    assert found
    client = redis.Redis(port=int(found[1]), socket_timeout=5)
    assert client.ping()
    victim.kill()
    assert up.complete(), "a lost store is a lost cache, not an error"

    def store_is_back() -> bool:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    eventually(store_is_back, "the store answers at its old address")
    assert up.children()["store"].pid != victim.pid
    client.close()
    assert up.output.count("was killed by SIGKILL; restarting") == 3

    members = family(up)
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(30) == 0
    assert not [member for member in members if member.is_running()]
    assert list(runtime_dir.iterdir()) == []
    assert shared_memory() <= shared_before


def test_a_busy_port_is_one_line_and_exit_code_2_and_nothing_was_started(
    start: Callable[[str], Up], runtime_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        up = start(STACK.replace("127.0.0.1:0", f"127.0.0.1:{port}"))
        assert up.process.wait(30) == 2
    assert up.output.strip().splitlines() == [
        f"kvhearth: error: {up.file}: router.listen: port {port} on 127.0.0.1 is in use; "
        "stop what listens there, or set another port (0 picks a free one)"
    ]
    assert list(runtime_dir.iterdir()) == []


def test_a_child_that_cannot_start_is_one_line_with_its_own_words(
    start: Callable[[str], Up], runtime_dir: Path
) -> None:
    up = start(STACK.replace("16MiB", "512TiB"))
    assert up.process.wait(60) == 2
    (line,) = up.output.strip().splitlines()
    assert line.startswith("kvhearth: error: store: exited with code 2 before the stack was ready: ")
    assert "512 TiB" in line
    assert list(runtime_dir.iterdir()) == []


def test_sigterm_during_the_start_stops_what_has_started(start: Callable[[str], Up], runtime_dir: Path) -> None:
    up = start(STACK)
    eventually(lambda: bool(family(up)), "first child")
    members = family(up)
    up.process.terminate()
    assert up.process.wait(30) == 0
    assert not [member for member in members if member.is_running()]
    assert list(runtime_dir.iterdir()) == []


def test_children_die_with_a_killed_supervisor_and_the_next_one_cleans_up_after_it(
    start: Callable[[str], Up], runtime_dir: Path
) -> None:
    minimal = 'pools: [{model: Llama-3.1-8B, replicas: 2}]\nrouter: {listen: "127.0.0.1:0"}'
    up = start(minimal)
    eventually(lambda: len(up.children()) == 2, "both engines")
    members = family(up)
    up.process.kill()
    up.process.wait()
    eventually(lambda: not any(member.is_running() for member in members), "children gone")
    (left,) = runtime_dir.iterdir()
    following = start(minimal)
    eventually(lambda: bool(family(following)), "first child")
    assert not left.exists()
    following.process.send_signal(signal.SIGHUP)
    assert following.process.wait(30) == 0


def test_a_stack_that_does_not_read_is_one_line_and_exit_code_2(start: Callable[[str], Up]) -> None:
    up = start("pools: [{model: Llama-3.1-8B, ofload: {mode: native}}]")
    assert up.process.wait(30) == 2
    assert up.output == f"kvhearth: error: {up.file}: pools[0].ofload: unknown key; did you mean offload?\n"
