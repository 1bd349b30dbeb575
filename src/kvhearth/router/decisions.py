"""The last decisions, kept as they were made, and explained when somebody asks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvhearth.router.engines import Target
from kvhearth.routing.explain import explain
from kvhearth.routing.policies.kv_aware import KvAware, Score
from kvhearth.routing.ports import Decision, EngineView, Policy, RouteRequest


class Choice(NamedTuple):
    """Where a request goes, and what was seen of it when that was decided.

    ``prefill_tokens`` of the prompt are believed to need computing; ``header_lines`` tell the client of the decision.
    After ``prefill_seconds`` that counts as done where no first token shows it (0.0 = with the answer).
    """

    target: Target
    view: EngineView
    decision: Decision
    prefill_tokens: int
    header_lines: bytes
    prefill_seconds: float = 0.0


class Decided(NamedTuple):
    """One decision with all that it was made from. ``at`` is Unix time in seconds."""

    number: int
    request_id: bytes
    at: float
    route: RouteRequest
    views: Sequence[EngineView]
    decision: Decision


_Fields = tuple[int, bytes, float, RouteRequest, Sequence[EngineView], Decision]
"""Of a `Decided`, as kept: a plain tuple is made in a third of the time."""


class DecisionLog:
    """Keeps the last ``kept`` decisions with all they were made from; a prompt's keys and hashes are bounded.

    Args:
        policy: what made them; kv-aware is asked again how it ranks the targets, with the hits of the time of asking.
        now: Unix time in seconds.
    """

    def __init__(self, kept: int, policy: Policy, now: Callable[[], float] = time.time) -> None:
        self._kept: deque[_Fields] = deque(maxlen=kept)
        self._policy = policy
        self._now = now
        self._number = 0

    def add(self, request_id: bytes, route: RouteRequest, views: Sequence[EngineView], decision: Decision) -> int:
        """Keep a decision; returns its number."""
        self._number += 1
        self._kept.append((self._number, request_id, self._now(), route, views, decision))
        return self._number

    def find(self, name: str) -> list[dict[str, Any]]:
        """The decisions of that number, or for requests with that ``x-request-id`` (a retry is another)."""
        wanted = name.encode("latin-1", "replace")
        kept = [Decided(*fields) for fields in self._kept]
        return [self._shown(one) for one in kept if str(one.number) == name or one.request_id == wanted]

    def last(self, count: int) -> list[dict[str, Any]]:
        """The latest decisions, newest first."""
        newest = list(self._kept)[-count:] if count > 0 else []
        return [self._shown(Decided(*fields)) for fields in reversed(newest)]

    def _shown(self, kept: Decided) -> dict[str, Any]:
        scores: Sequence[Score] = ()
        if isinstance(self._policy, KvAware) and kept.route.block_tokens:
            scores = self._policy.scores(kept.route, kept.views)
        return {
            "id": kept.number,
            "request_id": kept.request_id.decode("latin-1"),
            "at": kept.at,
            **explain(kept.decision, kept.route, kept.views, scores),
        }
