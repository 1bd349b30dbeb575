"""`kvhearth store ping` and `stats`: is it there, and how is it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvhearth.cli.store_target import Target, no_answer, takes_target
from kvhearth.store.client.client import StoreClient


@takes_target
def ping(target: Target) -> None:
    """Check that a store answers."""
    client = target.client()
    try:
        reason = client.ping()
    finally:
        client.close()
    if reason is not None:
        if isinstance(client, StoreClient):
            with target.admin() as admin:  # one node can be asked for its own words
                admin.stats()
        raise no_answer(target.address, reason.value)
    typer.echo("PONG")


@takes_target
def stats(
    target: Target,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, as KV.STATS answers.")] = False,
) -> None:
    """Print a store's figures, one `name value` a line."""
    with target.admin() as admin:
        figures = admin.stats()
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    for name, value in _flat("", figures):
        typer.echo(f"{name} {value}")


def _flat(path: str, value: Any) -> list[tuple[str, Any]]:
    """Nested figures as (dotted name, plain value)."""
    if isinstance(value, dict):
        pairs = ((f"{path}.{name}" if path else str(name), inner) for name, inner in value.items())
        return [line for name, inner in pairs for line in _flat(name, inner)]
    if isinstance(value, list):
        return [line for index, inner in enumerate(value) for line in _flat(f"{path}.{index}", inner)]
    return [(path, json.dumps(value) if isinstance(value, (bool, type(None))) else value)]
