"""``kvhearth router key`` and ``tenants``: makes tenants' keys, and shows what a tenants file says."""

from __future__ import annotations

import hashlib
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvhearth.cli import console
from kvhearth.errors import UserError
from kvhearth.router.tenants.spec import TenantSpec, read_tenants

KEY_PREFIX = "kvh-"
KEY_BYTES = 32


def key(
    check: Annotated[
        Path | None, typer.Option(help="Read a key from standard input and say whose it is in this tenants file.")
    ] = None,
) -> None:
    """Make a key for a tenant: 256 random bits. It is shown once; the tenants file gets its digest only.

    Example: kvhearth router key
    """
    if check is not None:
        typer.echo(_owner(read_tenants(check), sys.stdin.readline().strip()))
        return
    made = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    typer.echo(made)
    console.err.print("for the tenants file:", f'keys: ["{_digest(made)}"]', style="dim", soft_wrap=True)


def tenants(file: Annotated[Path, typer.Argument(help="The tenants file.", show_default=False)]) -> None:
    """Check a tenants file and show who may do what. Keys are not in it."""
    table = Table(
        "tenant", "keys", "priority", "weight", "at once", "requests/min", "tokens/min", "KV shared with", "models"
    )
    for spec in read_tenants(file).values():
        table.add_row(
            spec.name,
            str(len(spec.keys)),
            str(spec.priority),
            f"{spec.weight:g}",
            _bound(spec.max_concurrency),
            _bound(spec.requests_per_minute),
            _bound(spec.tokens_per_minute),
            _sharers(spec),
            ", ".join(spec.models),
        )
    console.out.print(table)


def _digest(made: str) -> str:
    return f"sha256:{hashlib.sha256(made.encode()).hexdigest()}"


def _owner(specs: dict[str, TenantSpec], given: str) -> str:
    digest = hashlib.sha256(given.encode()).digest()
    for spec in specs.values():
        if digest in spec.keys:
            return spec.name
    raise UserError("nobody's key", where="standard input", remedy="make one with 'kvhearth router key'")


def _bound(value: int | None) -> str:
    return "any" if value is None else f"{value:,}"


def _sharers(spec: TenantSpec) -> str:
    if not spec.group:
        return "all that say nothing else"
    kind, _, name = spec.group.partition(" ")
    return "nobody" if kind == "tenant" else f"group {name}"
