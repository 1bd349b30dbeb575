"""A kvhearth store as a child process, on TCP and on a unix socket."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvhearth.store.client.client import StoreClient


class Store(NamedTuple):
    """Where a running store is to be found, and its process."""

    tcp: str
    unix: str
    pid: int

    def values(self) -> int:
        """Values that it holds."""
        with contextlib.closing(StoreClient(self.tcp, timeout_seconds=10.0)) as client:
            return int(client.stats().get("db0", "keys=0,").removeprefix("keys=").partition(",")[0])


@contextlib.contextmanager
def store_server(folder: Path, capacity_bytes: int) -> Iterator[Store]:
    """A running store; ended on the way out."""
    path = folder / "store.sock"
    command = [sys.executable, "-c", "from kvhearth.cli.main import main; main()", "store", "serve"]
    command += ["--listen", "127.0.0.1:0", "--unix", str(path), "--capacity", str(capacity_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().decode()
            if "127.0.0.1:" not in ready:
                raise SystemExit(f"the store did not start: {ready!r}")
            port = int(ready.partition("127.0.0.1:")[2].partition(",")[0])
            yield Store(f"127.0.0.1:{port}", f"unix:{path}", process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
