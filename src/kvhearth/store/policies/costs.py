"""Sorts chunks into cheap, usual and dear ones by what computing them again takes per byte."""

from __future__ import annotations

from kvhearth.store.policies.facts import Facts

CHEAP, USUAL, DEAR = range(3)
COSTS = 3

APART = 2.0
"""A chunk is dear from so many times the mean on, and cheap up to the mean divided by it."""

ATTENTION_DOUBLES_AT = 128
"""Place in its chain at which attention to what precedes it has doubled a chunk's cost, where the putter told none.

With chunks of 256 tokens: 4 · layers · heads · head_dim · context is the 2 · parameters of the rest at 31 k tokens for
Llama-3.1-8B (formula of prefill FLOPs: `kvhearth.cost.costmodel`).
"""

_MEAN_OVER = 1024


class Costs:
    """Keeps the mean of what was told lately. As long as nothing was told, every chunk is usual."""

    def __init__(self, facts: Facts) -> None:
        self._nbytes = facts.nbytes.data
        self._position = facts.position.data
        self._recompute_ns = facts.recompute_ns.data
        self._mean = 0.0  # ns per byte of what was told
        self._mean_at_head = 0.0  # the same, had each headed its chain
        self._told = 0

    def class_of(self, slot: int) -> int:
        """`CHEAP`, `USUAL` or `DEAR`, for a slot that has just been filled; what was told of it enters the mean."""
        dearer = 1 + self._position[slot] / ATTENTION_DOUBLES_AT
        if told_ns := self._recompute_ns[slot]:
            per_byte = told_ns / max(1, self._nbytes[slot])
            self._told = min(self._told + 1, _MEAN_OVER)
            self._mean += (per_byte - self._mean) / self._told
            self._mean_at_head += (per_byte / dearer - self._mean_at_head) / self._told
        elif self._told:
            per_byte = self._mean_at_head * dearer
        else:
            return USUAL
        if per_byte >= APART * self._mean:
            return DEAR
        return CHEAP if per_byte * APART <= self._mean else USUAL
