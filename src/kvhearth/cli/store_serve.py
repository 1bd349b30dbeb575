"""`kvhearth store serve`: its flags, made from the table of settings, and the life of the process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import typer

from kvhearth.cli import console, setting_flags
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer
from kvhearth.store.server.settings import TABLE, read_settings
from kvhearth.units import format_bytes

EXAMPLES = """Every flag can also be set in the environment as KVHEARTH_STORE_<NAME>, or in the file of --config as
<name> with underscores. A flag wins over the environment, and that over the file. A password is given by
KVHEARTH_STORE_PASSWORD or a file, never by a flag.

Examples:

  kvhearth store serve --capacity 2GiB

  kvhearth store serve --unix /run/kvhearth.sock --capacity 64GiB --http-listen 127.0.0.1:9420

  kvhearth store serve --listen 0.0.0.0:7420 --capacity 64GiB --users-file users --disk /nvme/kv --disk-capacity 2TiB

  kvhearth store serve --config store.yaml
"""


def serve(config: Path | None = None, **flags: Any) -> None:
    """Serve a store over the Redis protocol, until SIGINT or SIGTERM."""
    settings = read_settings(flags, os.environ, config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    listen = settings.listen_address
    if listen is not None and not listen.is_loopback and not settings.needs_login:
        console.warn(f"whoever reaches {listen} may read, change and delete everything (insecure)")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server = _start(settings, stop)
    try:
        typer.echo(_ready_line(server, settings))
        sys.stdout.flush()
        stop.wait()
    finally:
        server.stop()


serve.__signature__ = setting_flags.signature(TABLE)  # type: ignore[attr-defined]


def _start(config: StoreConfig, stop: threading.Event) -> StoreServer:
    taking = f"taking {format_bytes(config.capacity_bytes)} of memory"
    if not console.err.is_terminal:  # no bar there, and a large pool takes seconds
        console.err.print(f"{taking} …")
    with console.progress() as bar:
        task = bar.add_task(taking, total=config.capacity_bytes)

        def show(done: int, total: int) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            bar.update(task, completed=done, total=total)

        return StoreServer(config, show).start()


def _ready_line(server: StoreServer, config: StoreConfig) -> str:
    places = [str(address) for address in server.addresses]
    if server.http_address is not None:
        places.append(f"http://{server.http_address}/metrics")
    return f"kvhearth store ready: {', '.join(places)}, capacity {format_bytes(config.capacity_bytes)}"
