"""What discovery says of one engine. Whether it is well is for probes to find out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kvhearth.errors import UserError
from kvhearth.router.config import EventSource, parse_engine_url
from kvhearth.router.config.parsing import Role, check_name
from kvhearth.router.config.router import MOST_RANKS

MOST_MEMBERS = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """An engine that is there.

    Args:
        name: stable; its label in metrics.
        url: ``http://host:port`` or ``https://host:port``.
        ranks: data-parallel ranks, each a target of its own.
        role: what it does of a request.
        draining: it ends what it has and is to get nothing new.
        models: names that it is declared to serve, before it was asked.
        events: where it publishes its KV events; None for nowhere.

    Raises:
        UserError: a value is impossible.
    """

    name: str
    url: str
    ranks: int = 1
    role: Role = "both"
    draining: bool = False
    models: tuple[str, ...] = ()
    events: EventSource | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        where = f"engine {self.name}"
        parse_engine_url(self.url, where=where)
        if not 1 <= self.ranks <= MOST_RANKS:
            raise UserError(f"{self.ranks} ranks", where=where, remedy=f"use 1 up to {MOST_RANKS}")
        if self.role not in get_args(Role):
            raise UserError(f"{self.role!r} is no role", where=where, remedy=f"use one of {', '.join(get_args(Role))}")
        if self.events is not None:
            self.events.check(where)
