"""Which tokens of a request were computed, which came from where, which were computed twice.

Pure functions on ranges. A range is ``(start, end)`` in token positions, end exclusive.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvhearth.engine.ports import Sources

HBM, DRAM, STORE = range(3)

Range = tuple[int, int]
Hit = tuple[int, int, int]
"""``(start, end, source)``: positions whose KV an admission found in HBM, DRAM or STORE."""


def merge(ranges: list[Range], start: int, end: int) -> list[Range]:
    """The union of disjoint, sorted ``ranges`` and ``(start, end)``, disjoint and sorted again."""
    out: list[Range] = []
    for low, high in ranges:
        if high < start:
            out.append((low, high))
        elif low > end:
            out.append((start, end))
            start, end = low, high
        else:
            start, end = min(start, low), max(end, high)
    out.append((start, end))
    return out


def overlap(ranges: Iterable[Range], start: int, end: int) -> int:
    """How many positions of ``(start, end)`` lie in the disjoint ``ranges``."""
    return sum(max(0, min(end, high) - max(start, low)) for low, high in ranges)


def settle(prompt_tokens: int, begun_at: int, hits: Iterable[Hit], computed: list[Range]) -> Sources:
    """Give each prompt token its one source, when the request gets past its prompt.

    Args:
        prompt_tokens: length of the prompt.
        begun_at: position at which the last admission began to compute; hits beyond it were not used.
        hits: what the last admission found.
        computed: what earlier admissions of the request computed before they were preempted: that counts as
            computed, even where it was found again in HBM later.
    """
    found = [0, 0, 0]
    for start, end, source in hits:
        used_end = min(end, begun_at)
        if start < used_end:
            found[source] += used_end - start - overlap(computed, start, used_end)
    return Sources(found[HBM], found[DRAM], found[STORE], prompt_tokens - sum(found))
