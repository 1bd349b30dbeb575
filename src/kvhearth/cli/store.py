"""`kvhearth store`: serve a store, or ask one how it is."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from kvhearth.cli import console
from kvhearth.cli.secrets import STORE_PASSWORD_VARIABLE, read_secret
from kvhearth.errors import UserError
from kvhearth.store.client import StoreClient
from kvhearth.store.config import DEFAULT_LISTEN, StoreConfig
from kvhearth.store.server import StoreServer
from kvhearth.units import format_bytes, parse_bytes

app = typer.Typer(help="The shared KV store.", no_args_is_help=True)

PasswordFile = Annotated[
    Path | None, typer.Option(help=f"File holding the password; else the environment's {STORE_PASSWORD_VARIABLE}.")
]
AddressOption = Annotated[str, typer.Option("--address", help="host:port or unix:/path.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.001, max=600)]

_SERVE_EXAMPLES = """Examples:

  kvhearth store serve --capacity 2GiB

  kvhearth store serve --unix /run/kvhearth.sock --capacity 64GiB --metrics-listen 127.0.0.1:9420

  KVHEARTH_STORE_PASSWORD=... kvhearth store serve --listen 0.0.0.0:7420 --capacity 64GiB
"""


@app.command(epilog=_SERVE_EXAMPLES)
def serve(
    *,
    listen: Annotated[
        str | None,
        typer.Option(help="host:port; port 0 takes a free one. Without --unix it is 127.0.0.1:7420, else none."),
    ] = None,
    unix: Annotated[Path | None, typer.Option(help="Path of a unix socket, which only this user may open.")] = None,
    capacity: Annotated[str, typer.Option(help="Memory for values, such as 512MiB or 2GiB.")] = "1GiB",
    max_value: Annotated[str, typer.Option(help="Longest value kept; 0: 64MiB or half of the capacity.")] = "0",
    max_connections: Annotated[int, typer.Option(help="Clients at once.")] = 256,
    idle_timeout_seconds: Annotated[float, typer.Option(help="A silent client is closed after this.")] = 300.0,
    stall_timeout_seconds: Annotated[
        float, typer.Option(help="A command must arrive, or its answer be taken, within this.")
    ] = 30.0,
    metrics_listen: Annotated[
        str | None, typer.Option(help="Loopback host:port for HTTP /health and /metrics; port 0 takes a free one.")
    ] = None,
    password_file: PasswordFile = None,
) -> None:
    """Serve a store over the Redis protocol, until SIGINT or SIGTERM."""
    config = StoreConfig(
        capacity_bytes=parse_bytes(capacity, where="--capacity"),
        listen=DEFAULT_LISTEN if listen is None and unix is None else listen,
        unix=unix,
        metrics_listen=metrics_listen,
        password=_password(password_file),
        max_value_bytes=parse_bytes(max_value, where="--max-value"),
        max_connections=max_connections,
        idle_timeout_seconds=idle_timeout_seconds,
        stall_timeout_seconds=stall_timeout_seconds,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server = _start(config, stop)
    try:
        typer.echo(_ready_line(server, config))
        sys.stdout.flush()
        stop.wait()
    finally:
        server.stop()


@app.command()
def ping(
    address: AddressOption = DEFAULT_LISTEN, timeout_seconds: Timeout = 2.0, password_file: PasswordFile = None
) -> None:
    """Check that a store answers."""
    client = StoreClient(address, timeout_seconds=timeout_seconds, password=_password(password_file))
    try:
        reason = client.ping()
    finally:
        client.close()
    if reason is not None:
        raise _no_answer(address, reason.value)
    typer.echo("PONG")


@app.command()
def stats(
    address: AddressOption = DEFAULT_LISTEN, timeout_seconds: Timeout = 2.0, password_file: PasswordFile = None
) -> None:
    """Print a store's figures, one `name value` a line."""
    client = StoreClient(address, timeout_seconds=timeout_seconds, password=_password(password_file))
    try:
        figures = client.stats()
        outcomes = client.counts
    finally:
        client.close()
    if not figures:
        raise _no_answer(address, next(outcome for _, outcome in outcomes))
    for name, value in figures.items():
        typer.echo(f"{name} {value}")


def _password(file: Path | None) -> str | None:
    return read_secret(file, STORE_PASSWORD_VARIABLE, option="--password-file")


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
    if server.metrics_address is not None:
        places.append(f"http://{server.metrics_address}/metrics")
    return f"kvhearth store ready: {', '.join(places)}, capacity {format_bytes(config.capacity_bytes)}"


def _no_answer(address: str, reason: str) -> UserError:
    return UserError(
        f"no answer from {address} ({reason})",
        where="--address",
        remedy="start it with 'kvhearth store serve', or give its address and password",
    )
