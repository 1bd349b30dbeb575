"""All engines: who is a member, who is up, and which targets may be picked for a model at this moment."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvhearth.router.config import Limits, Resilience
from kvhearth.router.engines import Engine, Target

if TYPE_CHECKING:
    from kvhearth.router.discovery.member import Member

log = logging.getLogger(__name__)

MOST_REMEMBERED = 1000
"""Names of models whose last engine has left, so that they are known to be away and not unknown."""


class Watcher(Protocol):
    """Who is told of engines that come and go; see `Fleet`."""

    def engine_came(self, engine: Engine) -> None:
        """It is new, and its health is not known yet."""

    def engine_left(self, engine: Engine) -> None:
        """It is a member no more; requests in flight may end."""

    def target_lost(self, target: Target) -> None:
        """It is unreachable: what it held in its cache is gone, and answers that have not begun will not come."""

    def room_made(self) -> None:
        """An engine can take more requests than a moment ago."""


class _Serving:
    """Targets of one model that may be picked now, by what they do."""

    __slots__ = ("answering", "prefilling")

    def __init__(self) -> None:
        self.answering: list[Target] = []
        self.prefilling: list[Target] = []


class Fleet:
    """All engines, and which targets serve a model: those that are up, not draining, and whose breaker is not open.

    Args:
        limits, resilience: bounds of an engine.
        watcher: told of changes.
        declared: models that are served though perhaps no engine is there yet.
        https: what https engines are verified with.
    """

    def __init__(
        self,
        limits: Limits,
        resilience: Resilience,
        watcher: Watcher,
        declared: Sequence[str] = (),
        https: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits
        self._resilience = resilience
        self._watcher = watcher
        self._declared = tuple(declared)
        self._https = https
        self._away: dict[str, None] = {}
        self._engines: dict[str, Engine] = {}
        self._serving: dict[str, _Serving] = {}
        self._adapters: frozenset[str] = frozenset()
        self.is_disaggregated = False
        """Whether some model has engines that only prefill."""
        self.leaving: list[Engine] = []
        self.complete = True
        """Whether all who tell of engines have done so at least once."""
        self.targets: dict[str, Target] = {}
        self._refresh()

    @property
    def engines(self) -> list[Engine]:
        """The members, whether up or not."""
        return list(self._engines.values())

    def engine(self, name: str) -> Engine | None:
        """The member of that name."""
        return self._engines.get(name)

    # What decisions ask

    def serving(self, model: str) -> list[Target] | None:
        """The targets that may answer requests for this model, possibly none; None when nobody ever had it.

        Engines that only prefill answer where no other does.
        """
        found = self._serving.get(model)
        return None if found is None else found.answering or found.prefilling

    def prefilling(self, model: str) -> list[Target]:
        """The targets of role prefill with this model, where others decode; else none."""
        found = self._serving.get(model)
        return found.prefilling if found is not None and found.answering else []

    def models(self) -> list[str]:
        """Every model that is declared, or that an engine has or had when it was last up; no adapters."""
        return [model for model in self._serving if model not in self._adapters]

    def is_adapter(self, model: str) -> bool:
        """Whether an engine lists this name as a LoRA adapter (a card with a parent)."""
        return model in self._adapters

    def fully_known(self) -> bool:
        """Whether every engine has told its models, so that a model not among them does not exist."""
        return self.complete and all(engine.models is not None for engine in self._engines.values())

    def healthy(self) -> list[Engine]:
        """The engines that are up and take requests."""
        return [engine for engine in self._engines.values() if engine.healthy and not engine.draining]

    # Membership

    def update(self, members: Iterable[Member]) -> None:
        """These are the members from now on. One whose address or ranks changed is another engine of the same name."""
        wanted = {member.name: member for member in members}
        for engine in self.engines:
            member = wanted.get(engine.name)
            if member is None or (member.url, member.ranks) != (engine.member.url, engine.member.ranks):
                self._remove(engine)
        for member in wanted.values():
            known = self._engines.get(member.name)
            if known is None:
                self._add(member)
            elif known.member != member:
                if member.draining and not known.member.draining:
                    log.info("engine %s drains: it is leaving", known.name)
                known.member = member
        self._refresh()
        self._watcher.room_made()

    def _add(self, member: Member) -> None:
        engine = self._engines[member.name] = Engine(member, self._limits, self._resilience, self._https)
        self.targets.update((target.name, target) for target in engine.targets)
        log.info("engine %s has come, at %s", engine.name, member.url)
        self._watcher.engine_came(engine)

    def _remove(self, engine: Engine) -> None:
        log.info("engine %s has left", engine.name)
        del self._engines[engine.name]
        for target in engine.targets:
            del self.targets[target.name]
        engine.healthy = False
        adapters = {card["id"] for card in engine.cards if isinstance(card.get("parent"), str)}
        self._away.update(dict.fromkeys((engine.models or frozenset(engine.member.models)) - adapters))
        while len(self._away) > MOST_REMEMBERED:
            del self._away[next(iter(self._away))]
        self.leaving.append(engine)
        self._watcher.engine_left(engine)

    def gone(self) -> list[Engine]:
        """Those that were leaving and have no request any more; they are forgotten with this."""
        gone = [engine for engine in self.leaving if not engine.requests_in_flight]
        for engine in gone:
            self.leaving.remove(engine)
            for connection in list(engine.connections):
                connection.close()
        return gone

    def drain(self, engine: Engine, *, drained: bool) -> None:
        """An operator wants it to get no new requests, or to get them again."""
        engine.drained = drained
        log.info("engine %s %s", engine.name, "drains" if drained else "takes requests again")
        self._refresh()
        self._watcher.room_made()

    def follow(self, limits: Limits, resilience: Resilience, declared: Sequence[str]) -> None:
        """Other settings from now on."""
        self._limits, self._resilience, self._declared = limits, resilience, tuple(declared)
        for engine in self._engines.values():
            engine.breaker.follow(resilience)
            engine.capacity.settle(limits.max_requests_per_engine)
        self._refresh()
        self._watcher.room_made()

    # Health

    def mark_up(self, engine: Engine, cards: list[dict[str, Any]], now: float) -> None:
        """The engine answers and serves the models of ``cards`` (objects of ``/v1/models`` with a string ``id``)."""
        came_up = not engine.healthy
        models = frozenset(card["id"] for card in cards)
        if came_up:
            log.info("engine %s is up with models %s", engine.name, ", ".join(models))
            engine.up_at = now
            engine.breaker.reset()
            engine.capacity.on_trial(self._limits.max_requests_per_engine, on_trial=False)
        changed = came_up or models != engine.models or cards != engine.cards
        engine.healthy = True
        engine.cards = cards
        engine.models = models
        if changed:
            self._refresh()
            self._watcher.room_made()

    def mark_down(self, engine: Engine, reason: str, *, unreachable: bool) -> None:
        """The engine is not to be used until it is marked up again. Its models stay known (503, not 404)."""
        if unreachable:
            for target in engine.targets:
                self._watcher.target_lost(target)
            for connection in list(engine.idle):
                connection.close()
        if engine.healthy:
            log.warning("engine %s is down: %s", engine.name, reason)
            engine.healthy = False
            self._refresh()

    def answered(self, engine: Engine, status: int, now: float) -> None:
        """An answer of that status has begun."""
        if engine.breaker.answered(now, is_error=status >= 500):
            self._breaker_changed(engine)

    def failed(self, engine: Engine, now: float) -> None:
        """A request got no answer there."""
        if engine.breaker.failed(now):
            self._breaker_changed(engine)

    def reported(self, engine: Engine, waiting: int, backlog: int) -> None:
        """The engine told how many requests wait there, ``backlog`` of which may."""
        before = engine.capacity.most
        engine.capacity.reported(engine.requests_in_flight, waiting, backlog, self._limits.max_requests_per_engine)
        if engine.capacity.most > before:
            self._watcher.room_made()

    def sweep(self, now: float) -> None:
        """What time alone brings about: breakers that half open, cold engines that warm up."""
        for engine in self._engines.values():
            if engine.breaker.tick(now):
                self._breaker_changed(engine)
        self._warm(now)

    def _warm(self, now: float) -> None:
        seconds = self._resilience.slow_start_seconds
        most = self._limits.max_requests_per_engine
        healthy = self.healthy()
        warm = [engine.requests_in_flight for engine in healthy if now - engine.up_at >= seconds]
        mean = sum(warm) / len(warm) if warm else 0.0
        for engine in healthy:
            age = now - engine.up_at
            if age < 2 * seconds:  # once more after its time, to take the bound away
                before = engine.capacity.most
                engine.capacity.warming(age / seconds if warm else 1.0, mean, most)
                if engine.capacity.most > before:
                    self._watcher.room_made()

    def _breaker_changed(self, engine: Engine) -> None:
        state = engine.breaker.state
        log.warning("the breaker of engine %s is %s", engine.name, state.replace("_", " "))
        engine.capacity.on_trial(self._limits.max_requests_per_engine, on_trial=state == "half_open")
        self._refresh()
        self._watcher.room_made()

    def _refresh(self) -> None:
        self._serving = {model: _Serving() for model in (*self._declared, *self._away)}
        broken: list[Engine] = []
        for engine in self._engines.values():
            for model in engine.member.models if engine.models is None else engine.models:
                self._serving.setdefault(model, _Serving())
            if engine.healthy and not engine.draining:
                if engine.breaker.state == "open":
                    broken.append(engine)
                else:
                    self._serve(engine, engine.models or ())
        unserved = {model for model in self._serving if not self.serving(model)}
        for engine in broken:  # better than nobody
            self._serve(engine, unserved.intersection(engine.models or ()))
        self.is_disaggregated = any(serving.prefilling for serving in self._serving.values())
        self._adapters = frozenset(
            card["id"]
            for engine in self._engines.values()
            for card in engine.cards
            if isinstance(card.get("parent"), str)
        )

    def _serve(self, engine: Engine, models: Iterable[str]) -> None:
        for model in models:
            serving = self._serving[model]
            kind = serving.prefilling if engine.member.role == "prefill" else serving.answering
            kind.extend(engine.targets)
