"""`kvhearth store passwd` and `fsck`: the files of a store, whether it runs or not."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvhearth.cli import console
from kvhearth.errors import UserError
from kvhearth.store.server.passwords import hash_password, set_line
from kvhearth.store.server.users import MAX_USERS, Entry, User, make_user, read_users_file
from kvhearth.store.tiers.fsck import fsck as check_files
from kvhearth.units import format_bytes


def passwd(
    file: Annotated[Path, typer.Argument(help="The users file; made if there is none.", show_default=False)],
    user: Annotated[str, typer.Argument(help="The user to add, change or delete.", show_default=False)],
    *,
    rights: Annotated[
        str | None, typer.Option(help="Of read, write, admin, with commas. A new user's: read,write.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="The user's keys begin with this; '' for any. Not with admin.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the user.")] = False,
) -> None:
    """Set a user's password, rights and prefix in a users file. A running store takes it in within a second.

    The password is asked for twice, or is one line of standard input where that is no terminal.
    """
    present = read_users_file(file) if file.exists() else {}
    if delete:
        if user not in present:
            raise UserError(f"no user {user!r} in {file}", where="USER", remedy="name one that is there")
        set_line(file, user, None)
        typer.echo(f"deleted {user}")
        return
    if user not in present and len(present) >= MAX_USERS:
        raise UserError(f"there are {MAX_USERS} users already", where="USER", remedy="let engines share a user")
    chosen = _user_of(present.get(user), user, rights, prefix)
    hash_ = hash_password(_new_password(user))
    names = ",".join(right for right in ("read", "write", "admin") if right in chosen.rights)
    was_there = set_line(file, user, f"{user}:{hash_.phc()}:{names}:{chosen.prefix.decode()}")
    typer.echo(f"{'changed' if was_there else 'added'} {user}: {names}" + _confined(chosen.prefix))


def fsck(
    folder: Annotated[Path, typer.Argument(help="The disk tier's folder; no server may use it.", show_default=False)],
    *,
    delete: Annotated[bool, typer.Option("--delete", help="Delete what is corrupt or left half-written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read every file of a disk tier and say which are whole. Exit code 1: there are corrupt ones, and they stay."""
    with console.progress(percent=False) as bar:
        task = bar.add_task(f"reading {folder}", total=None)

        def show(files: int, nbytes: int) -> None:
            bar.update(task, completed=files, description=f"read {format_bytes(nbytes)} of {folder}")

        report = check_files(folder, delete=delete, progress=show)
    kinds = {"good": report.good, **{f"corrupt: {flaw}": tally for flaw, tally in report.corrupt.items()}}
    kinds |= {"foreign": report.foreign, "left over": report.leftover, "deleted": report.deleted}
    if as_json:
        typer.echo(json.dumps({kind: tally._asdict() for kind, tally in kinds.items()}))
    else:
        table = console.table("files that are", "files", "bytes", right=["files", "bytes"])
        for kind, tally in kinds.items():
            table.add_row(kind, f"{tally.files:,}", format_bytes(tally.nbytes))
        console.out.print(table)
    corrupt = sum(tally.files for tally in report.corrupt.values())
    if corrupt and report.deleted.files < corrupt + report.leftover.files:
        raise typer.Exit(1)


def _user_of(before: Entry | None, name: str, rights: str | None, prefix: str | None) -> User:
    if rights is not None:
        wanted = [right.strip() for right in rights.split(",")]
    else:
        wanted = sorted(before.user.rights) if before is not None else ["read", "write"]
    if prefix is None:
        prefix = before.user.prefix.decode() if before is not None else ""
    return make_user(name, wanted, prefix, where="passwd")


def _confined(prefix: bytes) -> str:
    return f", confined to keys that begin with {prefix.decode()}" if prefix else ""


def _new_password(user: str) -> bytes:
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n").encode()
    password = getpass.getpass(f"password of {user}: ")
    if getpass.getpass("again: ") != password:
        raise UserError("the two differ", where="password", remedy="try again")
    return password.encode()
