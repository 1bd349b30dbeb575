"""Threads inside vLLM's processes, named so that ``top -H`` and ``/proc`` show what they cost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """A running daemon thread called ``kvhearth-NAME``, also for the kernel (which keeps 15 characters)."""
    full = f"kvhearth-{name}"

    def named() -> None:
        with contextlib.suppress(OSError):  # Python tells the kernel from 3.14 on
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(full[:15], encoding="ascii")
        run()

    thread = threading.Thread(target=named, name=full, daemon=True)
    thread.start()
    return thread
