"""An engine as this router knows it, and what of it a policy can pick: its load, health and limits of the moment."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

from kvhearth.router.breaker import Breaker
from kvhearth.router.capacity import Capacity
from kvhearth.router.config import Limits, Resilience, parse_engine_url
from kvhearth.routing.ports import EngineView

if TYPE_CHECKING:
    from kvhearth.router.discovery.member import Member
    from kvhearth.router.upstream import UpstreamConnection

NEVER = float("-inf")


class Target:
    """What a policy can pick: an engine, or one data-parallel rank of an engine with several.

    Load is counted by exchanges, reports come from probes; the view is made anew only after one of them said something.
    """

    __slots__ = (
        "_view",
        "engine",
        "label",
        "name",
        "prefill_tokens",
        "rank",
        "requests_in_flight",
        "running",
        "tokens_in_flight",
        "ttft_factor",
        "waiting",
    )

    def __init__(self, engine: Engine, rank: int | None) -> None:
        self.engine = engine
        self.rank = rank
        self.name = engine.name if rank is None else f"{engine.name}#{rank}"
        self.label = self.name.encode()
        self.requests_in_flight = 0
        self.tokens_in_flight = 0
        self.prefill_tokens = 0
        self.waiting = 0
        self.running = 0
        self.ttft_factor = 1.0
        self._view: EngineView | None = None

    def load(self, tokens: int, prefill_tokens: int) -> None:
        """A request with that many prompt tokens, of which some must be computed, is sent there."""
        self.engine.requests_in_flight += 1
        self.requests_in_flight += 1
        self.tokens_in_flight += tokens
        self.prefill_tokens += prefill_tokens
        self._view = None

    def prefilled(self, prefill_tokens: int) -> None:
        """A request's first token has come, so its prompt is computed."""
        self.prefill_tokens -= prefill_tokens
        self._view = None

    def unload(self, tokens: int, prefill_tokens: int) -> None:
        """A request has ended; ``prefill_tokens`` of it were still to be computed."""
        self.engine.requests_in_flight -= 1
        self.requests_in_flight -= 1
        self.tokens_in_flight -= tokens
        self.prefill_tokens -= prefill_tokens
        self._view = None

    def reported(self, running: int, waiting: int) -> None:
        """The engine told how many requests it has, whoever sent them; 0 and 0 when it tells no more."""
        self.running = running
        self.waiting = waiting
        self._view = None

    def corrected(self, ttft_factor: float) -> None:
        """Observed over predicted time to first token there has changed."""
        self.ttft_factor = ttft_factor
        self._view = None

    def view(self) -> EngineView:
        """What a policy sees of it."""
        view = self._view
        if view is None:
            view = self._view = EngineView(
                self.name,
                self.requests_in_flight,
                self.tokens_in_flight,
                self.prefill_tokens,
                self.waiting,
                self.running,
                self.ttft_factor,
            )
        return view


class Engine:
    """One engine. Load is counted by its targets, all else by `Fleet`; neither touches the other's fields."""

    __slots__ = (
        "breaker",
        "capacity",
        "cards",
        "connections",
        "drained",
        "healthy",
        "host",
        "host_header",
        "idle",
        "member",
        "models",
        "name",
        "port",
        "requests_in_flight",
        "ssl",
        "targets",
        "up_at",
    )

    def __init__(
        self, member: Member, limits: Limits, resilience: Resilience, https: ssl.SSLContext | None = None
    ) -> None:
        self.member = member
        self.name = member.name
        self.host, self.port = parse_engine_url(member.url, where=f"engine {self.name}")
        self.ssl = https if member.url.startswith("https:") else None
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.host_header = f"{shown}:{self.port}".encode()
        self.healthy = False
        self.drained = False  # asked for by an operator
        self.up_at = NEVER
        self.models: frozenset[str] | None = None  # None: never told us
        self.cards: list[dict[str, Any]] = []
        self.requests_in_flight = 0
        self.breaker = Breaker(resilience)
        self.capacity = Capacity(limits.max_requests_per_engine)
        self.idle: list[UpstreamConnection] = []  # used last at the end
        self.connections: set[UpstreamConnection] = set()
        ranks = member.ranks
        self.targets = [Target(self, rank) for rank in range(ranks)] if ranks > 1 else [Target(self, None)]

    @property
    def tokens_in_flight(self) -> int:
        """Prompt tokens of its requests in flight, over all ranks."""
        return sum(target.tokens_in_flight for target in self.targets)

    @property
    def draining(self) -> bool:
        """Whether it ends what it has and gets nothing new."""
        return self.drained or self.member.draining

    @property
    def state(self) -> str:
        """In a word: down, draining, broken (its breaker is open), trial (it is half open) or healthy."""
        if not self.healthy:
            return "down"
        if self.draining:
            return "draining"
        return {"open": "broken", "half_open": "trial", "closed": "healthy"}[self.breaker.state]
