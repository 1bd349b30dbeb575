"""The engine with the fewest tokens in flight."""

from __future__ import annotations

from collections.abc import Sequence

from kvhearth.routing.ports import Decision, EngineView, RouteRequest


def lightest(engines: Sequence[EngineView], turn: int) -> EngineView:
    """The engine with the fewest tokens in flight; of equals, the one whose turn it is (``turn`` counts up by one)."""
    equals: list[EngineView] = []
    least = 0
    for engine in engines:
        tokens = engine.tokens_in_flight
        if not equals or tokens < least:
            least = tokens
            equals = [engine]
        elif tokens == least:
            equals.append(engine)
    return equals[turn % len(equals)]


def load_bound(engines: Sequence[EngineView], factor: float, slack_tokens: float) -> float:
    """Tokens in flight above which an engine has too many: ``factor`` times the mean, plus ``slack_tokens``."""
    total = 0
    for engine in engines:
        total += engine.tokens_in_flight
    return factor * total / len(engines) + slack_tokens


class LeastLoaded:
    """Balances by tokens, not requests: one long prompt weighs as much as many short ones."""

    name = "least-loaded"

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, request: RouteRequest, engines: Sequence[EngineView]) -> Decision:
        """The lightest engine; refusal ``no_healthy_engine`` when there is none."""
        if not engines:
            return Decision(None, "no_healthy_engine", reason="no engine to choose from")
        self._turn += 1
        return Decision(lightest(engines, self._turn).name, reason="least loaded")

    def engine_gone(self, engine: str) -> None:
        """Nothing is known of single engines here."""
