"""Which offload mode to choose once the figures are there: the least machinery that is not clearly slower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MARGIN = 0.03
"""Relative throughput that a mode must gain to be worth its memory and its parts. Published overheads of offloading
without benefit are 1.5 % (native) and 2.6 % (LMCache) [P: llm-d guides/tiered-prefix-cache/cpu, 8k prompt]; a gain
inside that band is not a gain."""

ORDER = ("none", "native", "shared")
"""From least machinery to most."""


class Verdict(NamedTuple):
    """The mode to choose, its gain over none (0.25 = 25 % more throughput), and the reason in one sentence."""

    mode: str
    gain: float
    reason: str


def gain(throughput: float, baseline: float) -> float:
    """Relative gain over a baseline; 0 when the baseline is 0."""
    return throughput / baseline - 1.0 if baseline else 0.0


def choose(throughput: Mapping[str, float], margin: float = MARGIN) -> Verdict:
    """The first mode in `ORDER` that every later one beats by less than ``margin``.

    Args:
        throughput: tokens a second by mode; must hold ``none``.
        margin: see `MARGIN`.
    """
    modes = [mode for mode in ORDER if mode in throughput]
    chosen = modes[0]
    for mode in modes[1:]:
        if gain(throughput[mode], throughput[chosen]) >= margin:
            chosen = mode
    over_none = {mode: gain(throughput[mode], throughput["none"]) for mode in modes}
    others = ", ".join(f"{mode} {over_none[mode]:+.1%}" for mode in modes if mode not in ("none", chosen))
    if chosen == "none":
        reason = f"offloading does not pay here ({others} throughput; it must gain {margin:.0%})"
    else:
        reason = f"{chosen} serves {over_none[chosen]:.1%} more tokens a second than none"
        reason += f" ({others})" if others else ""
        if any(throughput[mode] > throughput[chosen] for mode in modes):
            reason += f"; what is more than {chosen} must gain {margin:.0%} on it to be worth its parts"
    return Verdict(chosen, over_none[chosen], reason)
