"""``kvhearth router``: runs the front door. Parses flags and prints one line; the work is in the room ``router``."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvhearth.cli.secrets import ROUTER_KEY_VARIABLE, STORE_PASSWORD_VARIABLE, read_secret
from kvhearth.errors import UserError
from kvhearth.routing.policies.prefix import PrefixSettings
from kvhearth.routing.registry import POLICY_NAMES
from kvhearth.units import parse_bytes

if TYPE_CHECKING:
    from kvhearth.router.config import EventSource

SNAPSHOT_VARIABLE = "KVHEARTH_SNAPSHOT_TOKEN"

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
    policy: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(POLICY_NAMES)}.", show_default="kv-aware with --kv-events, else prefix"),
    ] = None,
    alias: Annotated[list[str] | None, typer.Option(help="A further name of a model: alias=model. Repeatable.")] = None,
    data_parallel: Annotated[
        list[str] | None,
        typer.Option(help="Data-parallel ranks of an engine, each routed to on its own: name=ranks. Repeatable."),
    ] = None,
    session_header: Annotated[
        str, typer.Option(help="Policy session: the header whose value keeps requests together.")
    ] = "x-session-id",
    kv_events: Annotated[
        list[str] | None,
        typer.Option(help="Where an engine publishes its KV events: name=tcp://host:port. Repeatable."),
    ] = None,
    kv_replay: Annotated[
        list[str] | None, typer.Option(help="Where it replays them: name=tcp://host:port. Repeatable.")
    ] = None,
    kv_snapshot: Annotated[
        list[str] | None,
        typer.Option(help=f"Where it tells what it holds: name=host:port; the token is in {SNAPSHOT_VARIABLE}."),
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            help=f"Address of the shared store, whose feed says what it holds; password: {STORE_PASSWORD_VARIABLE}."
        ),
    ] = "",
    tokenizer: Annotated[
        str, typer.Option(help="Directory of the model's tokenizer; without one the engines are asked for token ids.")
    ] = "",
    block_size: Annotated[
        int, typer.Option(help="Tokens of the engines' KV blocks; 0 takes what their events say.")
    ] = 0,
    index_size: Annotated[str, typer.Option(help="Most memory of the KV index, as 512MiB.")] = "512MiB",
    gpu: Annotated[
        str, typer.Option(help="Policy kv-aware: the engines' GPU, for the cost model; without it a rate is learned.")
    ] = "",
    cost_model: Annotated[str, typer.Option(help="Policy kv-aware: the model in the catalog, with --gpu.")] = "",
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs of one engine, with --gpu.")] = 1,
    decisions_kept: Annotated[int, typer.Option(help="Decisions that /debug/decision can explain.")] = 64,
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

    from kvhearth.router.config import MIB, HealthChecks, KvSettings, Limits, RouterConfig, Timeouts, parse_listen
    from kvhearth.router.router import Router

    host, port = parse_listen(listen)
    config = RouterConfig(
        engines=[_named(text) for text in engine],
        listen_host=host,
        listen_port=port,
        policy=policy,
        kv=KvSettings(
            events=_event_sources(kv_events or [], kv_replay or [], kv_snapshot or []),
            tokenizer=tokenizer,
            store=store,
            store_password=read_secret(None, STORE_PASSWORD_VARIABLE, option="--store"),
            snapshot_token=read_secret(None, SNAPSHOT_VARIABLE, option="--kv-snapshot") or "",
            block_tokens=block_size,
            index_bytes=parse_bytes(index_size, where="--index-size"),
            gpu=gpu,
            model=cost_model,
            tensor_parallel=tensor_parallel_size,
        ),
        aliases=_pairs(alias or [], "--alias", "alias=model"),
        data_parallel={
            name: _whole(count, f"--data-parallel {name}")
            for name, count in _pairs(data_parallel or [], "--data-parallel", "name=ranks").items()
        },
        session_header=session_header,
        decisions_kept=decisions_kept,
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
        served = f"policy {config.policy_name}, {len(config.engines)} engine(s)"
        typer.echo(f"router ready on http://{shown}:{port}, {served}")
        # What is there now stays, and requests leave no cycles behind: a collector that walks through the KV index
        # every few requests finds nothing and holds them all up.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 100)

    uvloop.run(Router(config).serve(ready))


def _named(text: str) -> tuple[str, str]:
    """``name=url`` or ``url``, whose name is then its host and port."""
    name, equals, url = text.partition("=")
    if equals and "://" not in name:
        return name, url
    return text.partition("://")[2].rstrip("/") or text, text


def _pairs(texts: list[str], flag: str, form: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise UserError(f"{text!r} is not {form}", where=flag, remedy=f"give {form}")
        if name in pairs:
            raise UserError(f"{name!r} is there twice", where=flag, remedy="give it once")
        pairs[name] = value
    return pairs


def _whole(text: str, flag: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"{text!r} is not a whole number", where=flag, remedy="give one, as 8")
    return int(text)


def _event_sources(events: list[str], replay: list[str], snapshot: list[str]) -> dict[str, EventSource]:
    from kvhearth.router.config import EventSource

    urls = _pairs(events, "--kv-events", "name=tcp://host:port")
    replays = _pairs(replay, "--kv-replay", "name=tcp://host:port")
    snapshots = _pairs(snapshot, "--kv-snapshot", "name=host:port")
    for flag, named in (("--kv-replay", replays), ("--kv-snapshot", snapshots)):
        for name in named.keys() - urls.keys():
            raise UserError(f"{name!r} publishes no events", where=flag, remedy="name it in --kv-events too")
    return {name: EventSource(url, replays.get(name, ""), snapshots.get(name, "")) for name, url in urls.items()}
