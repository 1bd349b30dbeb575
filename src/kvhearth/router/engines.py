"""The engines as this router knows them: up or down, which models they serve, and the load put on them from here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvhearth.router.config import parse_engine_url
from kvhearth.routing.ports import EngineView

if TYPE_CHECKING:
    from kvhearth.router.upstream import UpstreamConnection

log = logging.getLogger(__name__)


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
    """One engine. Load is counted by its targets, health by `Fleet`; neither touches the other's fields."""

    __slots__ = (
        "cards",
        "connections",
        "healthy",
        "host",
        "host_header",
        "idle",
        "models",
        "name",
        "port",
        "requests_in_flight",
        "targets",
    )

    def __init__(self, name: str, url: str, ranks: int = 1) -> None:
        self.name = name
        self.host, self.port = parse_engine_url(url, where=f"engine {name}")
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.host_header = f"{shown}:{self.port}".encode()
        self.healthy = False
        self.models: frozenset[str] | None = None  # None: never told us
        self.cards: list[dict[str, Any]] = []
        self.requests_in_flight = 0
        self.idle: list[UpstreamConnection] = []  # used last at the end
        self.connections: set[UpstreamConnection] = set()
        self.targets = [Target(self, rank) for rank in range(ranks)] if ranks > 1 else [Target(self, None)]

    @property
    def tokens_in_flight(self) -> int:
        """Prompt tokens of its requests in flight, over all ranks."""
        return sum(target.tokens_in_flight for target in self.targets)


class Fleet:
    """All engines, and which healthy targets serve a model.

    Args:
        engines: (name, URL) each.
        target_gone: called for each target of an engine that became unreachable, for its cache is then gone too.
        ranks: data-parallel ranks by engine name; 1 where nothing is said.
    """

    def __init__(
        self,
        engines: Sequence[tuple[str, str]],
        target_gone: Callable[[str], None],
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        ranks = ranks or {}
        self.engines = [Engine(name, url, ranks.get(name, 1)) for name, url in engines]
        self.targets = {target.name: target for engine in self.engines for target in engine.targets}
        self._target_gone = target_gone
        self._serving: dict[str, list[Target]] = {}
        self._adapters: frozenset[str] = frozenset()

    def serving(self, model: str) -> list[Target] | None:
        """The healthy targets with this model, possibly none; None when no engine ever had it."""
        return self._serving.get(model)

    def models(self) -> list[str]:
        """Every model that an engine has or had when it was last up."""
        return list(self._serving)

    def is_adapter(self, model: str) -> bool:
        """Whether an engine lists this name as a LoRA adapter (a card with a parent)."""
        return model in self._adapters

    def fully_known(self) -> bool:
        """Whether every engine has told its models, so that a model not among them does not exist."""
        return all(engine.models is not None for engine in self.engines)

    def healthy(self) -> list[Engine]:
        """The engines that are up."""
        return [engine for engine in self.engines if engine.healthy]

    def mark_up(self, engine: Engine, cards: list[dict[str, Any]]) -> None:
        """The engine answers and serves the models of ``cards`` (objects of ``/v1/models`` with a string ``id``)."""
        if not engine.healthy:
            log.info("engine %s is up with models %s", engine.name, ", ".join(card["id"] for card in cards))
        engine.healthy = True
        engine.cards = cards
        engine.models = frozenset(card["id"] for card in cards)
        self._refresh()

    def mark_down(self, engine: Engine, reason: str, *, unreachable: bool) -> None:
        """The engine is not to be used until it is marked up again. Its models stay known (503, not 404)."""
        if unreachable:
            for target in engine.targets:
                self._target_gone(target.name)
            for connection in list(engine.idle):
                connection.close()
        if engine.healthy:
            log.warning("engine %s is down: %s", engine.name, reason)
            engine.healthy = False
            self._refresh()

    def _refresh(self) -> None:
        self._serving = {}
        for engine in self.engines:
            for model in engine.models or ():
                serving = self._serving.setdefault(model, [])
                if engine.healthy:
                    serving.extend(engine.targets)
        self._adapters = frozenset(
            card["id"] for engine in self.engines for card in engine.cards if isinstance(card.get("parent"), str)
        )
