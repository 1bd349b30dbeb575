"""The engines as this router knows them: up or down, which models they serve, and the load put on them from here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvhearth.router.config import parse_engine_url
from kvhearth.routing.ports import EngineView

if TYPE_CHECKING:
    from kvhearth.router.upstream import UpstreamConnection

log = logging.getLogger(__name__)


class Engine:
    """One engine. Load is counted by exchanges, health by `Fleet`; neither touches the other's fields."""

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
        "tokens_in_flight",
    )

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.host, self.port = parse_engine_url(url, where=f"engine {name}")
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.host_header = f"{shown}:{self.port}".encode()
        self.healthy = False
        self.models: frozenset[str] | None = None  # None: never told us
        self.cards: list[dict[str, Any]] = []
        self.requests_in_flight = 0
        self.tokens_in_flight = 0
        self.idle: list[UpstreamConnection] = []  # used last at the end
        self.connections: set[UpstreamConnection] = set()

    def view(self) -> EngineView:
        """What a policy sees of it."""
        return EngineView(self.name, self.requests_in_flight, self.tokens_in_flight)


class Fleet:
    """All engines, and which healthy ones serve a model.

    Args:
        engines: (name, URL) each.
        engine_gone: called when an engine became unreachable, for its cache is then gone too.
    """

    def __init__(self, engines: Sequence[tuple[str, str]], engine_gone: Callable[[str], None]) -> None:
        self.engines = [Engine(name, url) for name, url in engines]
        self._engine_gone = engine_gone
        self._serving: dict[str, list[Engine]] = {}

    def serving(self, model: str) -> list[Engine] | None:
        """The healthy engines with this model, possibly none; None when no engine ever had it."""
        return self._serving.get(model)

    def models(self) -> list[str]:
        """Every model that an engine has or had when it was last up."""
        return list(self._serving)

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
            self._engine_gone(engine.name)
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
                    serving.append(engine)
