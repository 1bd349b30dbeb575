"""``kvhearth router``: runs the front door. Parses flags and prints one line; the work is in the room ``router``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from kvhearth.cli.secrets import ROUTER_KEY_VARIABLE, read_secret
from kvhearth.routing.policies.prefix import PrefixSettings
from kvhearth.routing.registry import POLICY_NAMES

app = typer.Typer(help="OpenAI-compatible front door to several engines.", no_args_is_help=True)

_DEFAULTS = PrefixSettings()


@app.callback()
def router() -> None:
    """OpenAI-compatible front door to several engines."""


@app.command()
def serve(
    *,
    engine: Annotated[
        list[str], typer.Option(help="An engine: http://host:port or name=http://host:port. Repeatable.")
    ],
    listen: Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")] = "127.0.0.1:8000",
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICY_NAMES)}.")] = "prefix",
    prefix_max_pieces: Annotated[
        int, typer.Option(help="Policy prefix: pieces of 256 bytes remembered at most.")
    ] = _DEFAULTS.max_pieces,
    prefix_load_factor: Annotated[
        float, typer.Option(help="Policy prefix: pass over engines above this multiple of the mean load.")
    ] = _DEFAULTS.load_factor,
    max_body_mib: Annotated[int, typer.Option(help="Largest request body.")] = 32,
    max_requests_in_flight: Annotated[int, typer.Option(help="More are refused with 503.")] = 4096,
    connect_timeout_seconds: Annotated[float, typer.Option(help="To open a connection to an engine.")] = 5.0,
    first_byte_timeout_seconds: Annotated[
        float, typer.Option(help="To the first byte of a response; without streaming that is all of it.")
    ] = 600.0,
    idle_timeout_seconds: Annotated[float, typer.Option(help="Between two pieces of a response.")] = 120.0,
    drain_seconds: Annotated[float, typer.Option(help="For requests in flight when stopping.")] = 10.0,
    health_interval_seconds: Annotated[float, typer.Option(help="Between two health checks of an engine.")] = 1.0,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"File with the API key that clients must send; or set {ROUTER_KEY_VARIABLE}.")
    ] = None,
) -> None:
    """Route requests to engines until SIGTERM or SIGINT.

    Example: kvhearth router serve --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 --policy prefix
    """
    import uvloop

    from kvhearth.router.config import MIB, HealthChecks, Limits, RouterConfig, Timeouts, parse_listen
    from kvhearth.router.router import Router

    host, port = parse_listen(listen)
    config = RouterConfig(
        engines=[_named(text) for text in engine],
        listen_host=host,
        listen_port=port,
        policy=policy,
        prefix=PrefixSettings(max_pieces=prefix_max_pieces, load_factor=prefix_load_factor),
        limits=Limits(max_body_bytes=max_body_mib * MIB, max_requests_in_flight=max_requests_in_flight),
        timeouts=Timeouts(
            connect_seconds=connect_timeout_seconds,
            first_byte_seconds=first_byte_timeout_seconds,
            idle_seconds=idle_timeout_seconds,
            drain_seconds=drain_seconds,
        ),
        health=HealthChecks(interval_seconds=health_interval_seconds),
        api_key=read_secret(api_key_file, ROUTER_KEY_VARIABLE, option="--api-key-file"),
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")

    def ready(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"router ready on http://{shown}:{port}, policy {policy}, {len(config.engines)} engine(s)")

    uvloop.run(Router(config).serve(ready))


def _named(text: str) -> tuple[str, str]:
    """``name=url`` or ``url``, whose name is then its host and port."""
    name, equals, url = text.partition("=")
    if equals and "://" not in name:
        return name, url
    return text.partition("://")[2].rstrip("/") or text, text
