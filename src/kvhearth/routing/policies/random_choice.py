"""Any engine, each as likely as the other. The yardstick for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvhearth.routing.ports import Decision, EngineView, RouteRequest


class RandomChoice:
    """Draws evenly, whatever the load.

    Args:
        rng: where the draws come from; the same seed and calls give the same picks.
    """

    name = "random"

    def __init__(self, rng: Random | None = None) -> None:
        self._rng = rng or Random()

    def pick(self, request: RouteRequest, engines: Sequence[EngineView]) -> Decision:
        """Any of ``engines``; refusal ``no_healthy_engine`` when there is none."""
        if not engines:
            return Decision(None, "no_healthy_engine", reason="no engine to choose from")
        return Decision(engines[int(self._rng.random() * len(engines))].name, reason="drawn")

    def engine_gone(self, engine: str) -> None:
        """Nothing is known of single engines here."""
