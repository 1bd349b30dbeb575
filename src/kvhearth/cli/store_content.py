"""`kvhearth store ls` and `drop`: what a node holds, by namespace or key, and less of it."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from kvhearth.cli import console
from kvhearth.cli.store_target import Target, takes_target
from kvhearth.errors import UserError
from kvhearth.store.client.admin import Admin
from kvhearth.store.dram.shares import namespace_of
from kvhearth.units import format_bytes

_NO_NAMESPACE = "(none)"
_PASSES = 20


@takes_target
def ls(
    target: Target,
    *,
    namespace: Annotated[
        str | None, typer.Option(help="List the keys of this namespace: what stands before a key's first colon.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Most lines.", min=1)] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the namespaces a node holds with their chunks and bytes, in all tiers and in memory; or a namespace's keys.

    Uses no chunk: what is listed leaves memory no later than it would have.
    """
    with target.admin() as admin:
        if namespace is not None:
            _list_keys(admin, namespace, limit, as_json)
        else:
            _list_namespaces(admin, limit, as_json)


@takes_target
def drop(
    target: Target,
    *,
    namespace: Annotated[str | None, typer.Option(help="Delete every key of this namespace.")] = None,
    key: Annotated[str | None, typer.Option(help="Delete this key.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete everything. Needs the right admin.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete chunks from every tier of a node. Engines then compute what they would have found."""
    if (namespace is not None) + (key is not None) + everything != 1:
        raise UserError("say what to drop", remedy="give one of --namespace, --key and --all")
    with target.admin() as admin:
        if key is not None:
            typer.echo(f"dropped {admin.delete([key.encode('utf-8', 'surrogateescape')])} chunk(s)")
            return
        what = "everything" if namespace is None else f"namespace {namespace}"
        _confirm(f"drop {what} from {target.address}?", yes)
        if namespace is None:
            number = admin.count()
            admin.clear()
        else:
            number = _drop_namespace(admin, namespace)
    typer.echo(f"dropped {number} chunk(s)")


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(question, where="drop", remedy="give --yes where nobody can be asked")
    typer.confirm(question, abort=True, err=True)


def _drop_namespace(admin: Admin, namespace: str) -> int:
    dropped = 0
    with console.progress(percent=False) as bar:
        task = bar.add_task(f"dropping {namespace}", total=None)
        # Deleting moves what has not been listed yet, and engines may still put: look again until nothing is found.
        for _ in range(_PASSES):
            before = dropped
            for page in admin.pages(namespace):
                dropped += admin.delete(page)
                bar.update(task, completed=dropped)
            if dropped == before:
                return dropped
    console.warn(f"chunks of {namespace} keep coming; stop the engines that put them, and drop again")
    return dropped


def _list_keys(admin: Admin, namespace: str, limit: int, as_json: bool) -> None:
    held: dict[str, int] = {}
    more = False
    with console.progress(percent=False) as bar:
        task = bar.add_task(f"keys of {namespace}", total=limit)
        for page in admin.pages(namespace):
            for key, nbytes in admin.lengths(page) if page else []:
                if len(held) == limit:
                    more = True
                    break
                held[key.decode("utf-8", "backslashreplace")] = nbytes
            bar.update(task, completed=len(held))
            if more:
                break
    if as_json:
        typer.echo(json.dumps({"namespace": namespace, "keys": held, "more": more}))
        return
    table = console.table("key", "bytes", right=["bytes"])
    for name, nbytes in sorted(held.items()):
        table.add_row(name, format_bytes(nbytes))
    console.out.print(table)
    if more:
        console.warn(f"there are more than {limit} keys; see --limit")


def _list_namespaces(admin: Admin, limit: int, as_json: bool) -> None:
    stats = admin.stats()
    memory: dict[str, Any] = stats.get("namespaces", {})
    if "namespaces" in stats and not stats.get("tiers"):
        found = {name: [share["values"], share["value_bytes"]] for name, share in memory.items()}
    else:
        found = _count_namespaces(admin)
    rows = [
        {
            "namespace": name,
            "chunks": chunks,
            "bytes": nbytes,
            "dram_chunks": memory.get(name, {}).get("values", 0),
            "dram_bytes": memory.get(name, {}).get("value_bytes", 0),
        }
        for name, (chunks, nbytes) in sorted(found.items(), key=lambda item: item[1][1], reverse=True)
    ]
    tiers = {name: {"chunks": tier["items"], "bytes": tier["value_bytes"]} for name, tier in _tiers(stats).items()}
    if as_json:
        typer.echo(json.dumps({"namespaces": rows[:limit], "tiers": tiers, "more": len(rows) > limit}))
        return
    _print_namespaces(rows[:limit], tiers)
    if len(rows) > limit:
        console.warn(f"{len(rows) - limit} more namespaces are not shown; see --limit")


def _tiers(stats: dict[str, Any]) -> dict[str, Any]:
    """Figures by tier, memory first; none of a Redis."""
    return {"dram": stats["dram"], **stats.get("tiers", {})} if "dram" in stats else {}


def _print_namespaces(rows: list[dict[str, Any]], tiers: dict[str, dict[str, int]]) -> None:
    figures = ["chunks", "bytes", "in memory", "bytes in memory"]
    table = console.table("namespace", *figures, right=figures)
    for row in rows:
        name = row["namespace"] or _NO_NAMESPACE
        sizes = f"{row['chunks']:,}", format_bytes(row["bytes"]), f"{row['dram_chunks']:,}"
        table.add_row(name, *sizes, format_bytes(row["dram_bytes"]))
    console.out.print(table)
    if tiers:
        table = console.table("tier", "chunks", "bytes", right=["chunks", "bytes"])
        for name, tier in tiers.items():
            table.add_row(name, f"{tier['chunks']:,}", format_bytes(tier["bytes"]))
        console.out.print(table)


def _count_namespaces(admin: Admin) -> dict[str, list[int]]:
    """Chunks and bytes of each namespace, key by key."""
    found: dict[str, list[int]] = {}
    with console.progress() as bar:
        task = bar.add_task("counting chunks", total=admin.count())
        for page in admin.pages():
            for key, nbytes in admin.lengths(page) if page else []:
                share = found.setdefault(namespace_of(key).decode("utf-8", "backslashreplace"), [0, 0])
                share[0] += 1
                share[1] += nbytes
            bar.advance(task, len(page))
    return found
