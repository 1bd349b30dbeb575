"""Small real programs for the supervisor to run."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvhearth.control.child import ChildSpec
from kvhearth.control.ports import PortKeeper

SERVER = """
import http.server, signal, socketserver, sys, os
{before}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(os.getpid()).encode())
socketserver.TCPServer.allow_reuse_address = True
signal.signal(signal.SIGTERM, {on_term})
print("listening", flush=True)
socketserver.TCPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


def server(
    name: str, port: int, *, stage: int = 0, before: str = "", on_term: str = "lambda *a: os._exit(0)"
) -> ChildSpec:
    """A child that answers every GET with its process id."""
    code = SERVER.format(before=before, on_term=on_term, port=port)
    return ChildSpec(name, (sys.executable, "-c", code), f"http://127.0.0.1:{port}/health", stage)


@pytest.fixture
def ports() -> Iterator[PortKeeper]:
    with PortKeeper() as keeper:
        yield keeper


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a path short enough for unix sockets in it, which pytest's own need not be."""
    path = Path(tempfile.mkdtemp(prefix="kvh"))
    yield path
    shutil.rmtree(path)


def eventually(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Wait for a condition, and fail with its name when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether no process (or only a zombie) has this id."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


_here_before: set[int] = set()


@pytest.fixture(autouse=True)
def children_before() -> None:
    """Servers that other tests share, in this process, are none of a test's children."""
    _here_before.clear()
    _here_before.update(child.pid for child in psutil.Process().children(recursive=True))


def children_left() -> list[psutil.Process]:
    """Processes below this one that the test began, but for the tracker that multiprocessing keeps for a pool."""
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in _here_before]
    return [child for child in children if "multiprocessing.resource_tracker" not in " ".join(child.cmdline())]
