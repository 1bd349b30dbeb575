"""Each engine in turn, whatever its load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvhearth.routing.ports import Decision, EngineView, RouteRequest

MAX_SETS = 1024
"""Engine sets remembered; beyond that the set used longest ago starts again at its first engine."""


class RoundRobin:
    """Takes turns within each (model, engine set), so that models which alternate do not fix each other's engine."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[str, ...], int] = OrderedDict()

    def pick(self, request: RouteRequest, engines: Sequence[EngineView]) -> Decision:
        """The next engine of this model's set; refusal ``no_healthy_engine`` when there is none."""
        if not engines:
            return Decision(None, "no_healthy_engine", reason="no engine to choose from")
        key = (request.model, *[engine.name for engine in engines])
        turn = self._turns.pop(key, 0)
        self._turns[key] = turn + 1
        if len(self._turns) > MAX_SETS:
            self._turns.popitem(last=False)
        return Decision(engines[turn % len(engines)].name, reason="turn")

    def engine_gone(self, engine: str) -> None:
        """Forget the sets it was in."""
        for key in [key for key in self._turns if engine in key[1:]]:
            del self._turns[key]
