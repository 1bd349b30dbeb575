"""Engines that a YAML file lists, read again when it changes."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvhearth.errors import UserError
from kvhearth.router.config import EventSource
from kvhearth.router.discovery.member import MOST_MEMBERS, Member
from kvhearth.router.discovery.source import Source, Unavailable
from kvhearth.settings import read_yaml

LOOK_SECONDS = 1.0
NAMES = ("name", "url", "role", "data_parallel", "models", "draining", "kv_events", "kv_replay", "kv_snapshot")


class FileSource(Source):
    """``engines:`` with a list of mappings (`NAMES`) or of plain URLs. A file that cannot be used changes nothing."""

    def __init__(self, path: Path) -> None:
        super().__init__("file", LOOK_SECONDS)
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    async def look(self) -> Sequence[Member] | None:
        """See `Source`."""
        try:
            found = self._path.stat()
        except OSError as error:
            raise Unavailable("unreadable", f"{self._path}: {error.strerror}") from None
        seen = (found.st_mtime_ns, found.st_size, found.st_ino)
        if seen == self._seen:
            if self.last_error:
                raise Unavailable("invalid", self.last_error)
            return None
        try:
            members = await asyncio.to_thread(read_members, self._path)
        except UserError as error:
            raise Unavailable("invalid", str(error)) from None
        finally:
            self._seen = seen
        return members


def read_members(path: Path) -> list[Member]:
    """The engines that a file lists.

    Raises:
        UserError: it cannot be read, or an entry is impossible.
    """
    data, where = read_yaml(path), str(path)
    if not isinstance(data, dict) or data.keys() - {"engines"}:
        raise UserError("this is no list of engines", where=where, remedy="write 'engines:' and below it a list")
    entries = data.get("engines", [])
    if not isinstance(entries, list) or len(entries) > MOST_MEMBERS:
        raise UserError("engines is not a list of them", where=where, remedy=f"list at most {MOST_MEMBERS}")
    members = [_member(entry, f"{where}: engines[{number}]") for number, entry in enumerate(entries)]
    names = [member.name for member in members]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name!r} is there twice", where=where, remedy="give each engine its own name")
    return members


def _member(entry: Any, where: str) -> Member:
    if isinstance(entry, str):
        entry = {"url": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
        raise UserError("an engine without a url", where=where, remedy="write {name: a, url: http://host:port}")
    for key in entry:
        if key not in NAMES:
            near = difflib.get_close_matches(str(key), NAMES, 1)
            remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(NAMES)}"
            raise UserError(f"{key!r} is not known", where=where, remedy=remedy)
    events = None
    if entry.get("kv_events"):
        events = EventSource(*(str(entry.get(f"kv_{what}") or "") for what in ("events", "replay", "snapshot")))
    models = entry.get("models") or ()
    if not isinstance(models, (list, tuple)) or not all(isinstance(model, str) for model in models):
        raise UserError("models is not a list of names", where=where, remedy="write models: [name]")
    ranks = entry.get("data_parallel", 1)
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise UserError(f"data_parallel is {ranks!r}", where=where, remedy="write a whole number")
    draining = entry.get("draining", False)
    if not isinstance(draining, bool):
        raise UserError(f"draining is {draining!r}", where=where, remedy="write true or false")
    url = entry["url"]
    name = str(entry.get("name") or url.partition("://")[2].rstrip("/"))
    return Member(name, url, ranks, entry.get("role", "both"), draining, tuple(models), events)
