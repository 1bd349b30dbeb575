"""The border of routing: what a policy sees of a request and of the engines, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class RouteRequest(NamedTuple):
    """What routing needs of a request.

    ``prefix_hashes`` are chained hashes over fixed-size pieces of the prompt's text: equal hash = equal text up to
    there. ``prompt_tokens`` is exact or an estimate, used for load.
    """

    model: str
    prefix_hashes: Sequence[int]
    prompt_tokens: int


class EngineView(NamedTuple):
    """A routable engine at this moment: its name, and the load that this router has on it."""

    name: str
    requests_in_flight: int
    tokens_in_flight: int


class Decision(NamedTuple):
    """An engine, or a named refusal (exactly one of the two), with the reason in words.

    ``matched`` is how many leading prefix hashes the policy believes the engine has.
    """

    engine: str | None
    refusal: str | None = None
    matched: int = 0
    reason: str = ""


class Policy(Protocol):
    """Picks an engine. Synchronous, total, allocation-light; state is bounded; no clock, no socket."""

    name: str

    def pick(self, request: RouteRequest, engines: Sequence[EngineView]) -> Decision:
        """Decide for one request among the engines that serve its model and are healthy (possibly none)."""

    def engine_gone(self, engine: str) -> None:
        """Forget what is known of an engine that left or lost its cache."""
