"""A real store as a child process that can be stopped, killed and restarted, and RESP as it goes over the wire."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any


class StoreProcess:
    """A store at a fixed address."""

    def __init__(self, capacity: str = "256MiB") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._capacity = capacity
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, "-m", "kvhearth", "store", "serve", "--listen", self.address]
        argv += ["--capacity", self._capacity, "--http-listen", "127.0.0.1:0"]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self._process.poll() is None, "the store did not start"
            time.sleep(0.05)
        raise TimeoutError("the store did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop_for_a_while(self) -> None:
        """It is there and does not answer."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # each of its threads stops when it is scheduled next

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def command(self, *parts: bytes) -> Any:
        """One RESP2 command and its answer: bytes, int, None or a list of them."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as sock:
            sock.sendall(encode(*parts))
            with sock.makefile("rb") as stream:
                return read_reply(stream)

    def count(self) -> int:
        """Values held."""
        info: bytes = self.command(b"INFO")
        lines = [line for line in info.decode().splitlines() if line.startswith("db0:keys=")]
        return int(lines[0].removeprefix("db0:keys=").partition(",")[0]) if lines else 0


def encode(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def read_reply(stream: Any) -> Any:
    line = stream.readline()
    kind, rest = line[:1], line[1:-2]
    if kind in b"+-":
        return line[:-2]
    if kind == b":":
        return int(rest)
    if kind == b"$":
        if rest == b"-1":
            return None
        data = stream.read(int(rest))
        stream.read(2)
        return data
    assert kind == b"*", line
    return [read_reply(stream) for _ in range(int(rest))]
