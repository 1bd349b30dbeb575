"""Sends a prompt to the engine that most likely still holds the KV of its beginning. Knows only its own decisions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvhearth.errors import UserError
from kvhearth.routing.policies.least_loaded import lightest, load_bound
from kvhearth.routing.ports import Decision, EngineView, RouteRequest


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """Bounds and guards of the prefix policy.

    Args:
        max_pieces: pieces remembered over all engines, about 200 bytes of memory each. The default covers 64 MiB of
            prompt text (16 M tokens).
        load_factor: an engine is passed over when its tokens in flight exceed ``load_factor`` times the mean plus
            ``load_slack_tokens``. 1.25 is the bound of consistent hashing with bounded loads (Mirrokni, Thorup and
            Zadimoghaddam, 2018).
        load_slack_tokens: keeps the guard quiet while there is little load to balance.
        min_share: a match of fewer than this share of the prompt's pieces counts as none, so that a short header
            common to all prompts does not gather them on one engine.
    """

    max_pieces: int = 262_144
    load_factor: float = 1.25
    load_slack_tokens: int = 8192
    min_share: float = 0.1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_pieces", 1, float("inf")),
            ("load_factor", 1, float("inf")),
            ("load_slack_tokens", 0, float("inf")),
            ("min_share", 0, 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UserError(
                    f"{value} is out of range", where=f"policy prefix, {name}", remedy=f"use {low} up to {high}"
                )


class Prefix:
    """Longest match wins, within the load guard; of equals the least loaded.

    An engine's memory is one LRU of pieces. A prompt touches all its pieces, the first one last, so a piece is always
    older than those before it: eviction takes the ends of prompts first, and the pieces held of any prompt are a
    prefix of it. That is what allows the binary search.
    """

    name = "prefix"

    def __init__(self, settings: PrefixSettings | None = None) -> None:
        self._settings = settings or PrefixSettings()
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._size = 0
        self._turn = 0

    @property
    def size(self) -> int:
        """Pieces remembered, over all engines; never above ``max_pieces`` between calls."""
        return self._size

    def pick(self, request: RouteRequest, engines: Sequence[EngineView]) -> Decision:
        """The engine to use, of which it is assumed from now on that it holds this prompt.

        Refusal ``no_healthy_engine`` when there is none to choose from.
        """
        if not engines:
            return Decision(None, "no_healthy_engine", reason="no engine to choose from")
        self._turn += 1
        hashes = request.prefix_hashes
        allowed, best, longest = self._longest(engines, hashes)
        if longest and longest >= self._settings.min_share * len(hashes):
            chosen, reason = lightest(best, self._turn), "longest match"
        else:
            chosen, reason = lightest(allowed, self._turn), "no match, least loaded"
            if longest:
                longest = self._matched(chosen.name, hashes)
        self._learn(chosen.name, hashes)
        return Decision(chosen.name, None, longest, reason)

    def engine_gone(self, engine: str) -> None:
        """Forget what that engine held."""
        held = self._held.pop(engine, None)
        if held is not None:
            self._size -= len(held)

    def _longest(
        self, engines: Sequence[EngineView], hashes: Sequence[int]
    ) -> tuple[list[EngineView], list[EngineView], int]:
        """The engines within the load guard, those of them with the longest match, and its length in pieces."""
        bound = load_bound(engines, self._settings.load_factor, self._settings.load_slack_tokens)
        allowed: list[EngineView] = []
        best: list[EngineView] = []
        longest = 0
        for engine in engines:
            if engine.tokens_in_flight > bound:
                continue
            allowed.append(engine)
            matched = self._matched(engine.name, hashes)
            if matched > longest:
                longest = matched
                best = [engine]
            elif matched == longest:
                best.append(engine)
        return allowed, best, longest

    def _matched(self, engine: str, hashes: Sequence[int]) -> int:
        held = self._held.get(engine)
        if not held or not hashes or hashes[0] not in held:
            return 0
        if hashes[-1] in held:
            return len(hashes)
        low, high = 1, len(hashes) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low

    def _learn(self, engine: str, hashes: Sequence[int]) -> None:
        if len(hashes) > self._settings.max_pieces:
            hashes = hashes[: self._settings.max_pieces]
        held = self._held.get(engine)
        if held is None:
            held = self._held[engine] = OrderedDict()
        before = len(held)
        for piece in reversed(hashes):
            held[piece] = None
            held.move_to_end(piece)
        self._size += len(held) - before
        while self._size > self._settings.max_pieces:
            self._shrink()

    def _shrink(self) -> None:
        """Evict from whichever engine has most, so that a newcomer is not starved by those before it."""
        largest = max(self._held.values(), key=len)
        for _ in range(min(self._size - self._settings.max_pieces, len(largest))):
            largest.popitem(last=False)
            self._size -= 1
