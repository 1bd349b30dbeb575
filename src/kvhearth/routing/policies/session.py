"""Keeps what a client says belongs together on one engine, wherever that is not overloaded. No memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvhearth.errors import UserError
from kvhearth.routing.policies.least_loaded import lightest, load_bound
from kvhearth.routing.ports import Decision, EngineView, RouteRequest


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """When a session's home is passed over: its tokens in flight exceed ``load_factor`` times the mean plus
    ``load_slack_tokens`` (see `policies.prefix.PrefixSettings`)."""

    load_factor: float = 1.25
    load_slack_tokens: int = 8192

    def __post_init__(self) -> None:
        for name, low in (("load_factor", 1), ("load_slack_tokens", 0)):
            value = getattr(self, name)
            if not value >= low:
                raise UserError(
                    f"{value} is out of range", where=f"policy session, {name}", remedy=f"use {low} or more"
                )


class Session:
    """Rendezvous hashing (Thaler and Ravishankar, 1996) with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018).

    Each session ranks the engines in an order of its own and takes the first one within the bound. When an engine
    comes or goes, only the sessions that it is first for move. Without a session: least loaded.
    """

    name = "session"

    def __init__(self, settings: SessionSettings | None = None) -> None:
        self._settings = settings or SessionSettings()
        self._turn = 0

    def pick(self, request: RouteRequest, engines: Sequence[EngineView]) -> Decision:
        """The session's engine; refusal ``no_healthy_engine`` when there is none to choose from."""
        if not engines:
            return Decision(None, "no_healthy_engine", reason="no engine to choose from")
        if not request.session:
            self._turn += 1
            return Decision(lightest(engines, self._turn).name, reason="no session, least loaded")
        seed = xxh3_64_intdigest(request.session.encode("utf-8", "surrogatepass"))
        bound = load_bound(engines, self._settings.load_factor, self._settings.load_slack_tokens)
        home = chosen = None
        highest = highest_allowed = -1
        for engine in engines:
            rank = xxh3_64_intdigest(engine.name.encode("utf-8", "surrogatepass"), seed)
            if rank > highest:
                highest, home = rank, engine
            if engine.tokens_in_flight <= bound and rank > highest_allowed:
                highest_allowed, chosen = rank, engine
        assert home is not None and chosen is not None  # noqa: S101, PT018 - the lightest is always within the bound
        return Decision(
            chosen.name, reason="the session's engine" if chosen is home else "the session's engine is full"
        )

    def engine_gone(self, engine: str) -> None:
        """Nothing is known of single engines here."""
