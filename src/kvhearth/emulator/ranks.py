"""The data-parallel ranks of one emulated engine: an engine loop each, and which of them takes a call."""

from __future__ import annotations

from collections.abc import Sequence

from kvhearth.emulator.loop import EngineLoop
from kvhearth.emulator.protocol import ApiError

RANK_HEADER = b"x-data-parallel-rank"


class Ranks:
    """At least one loop, in order of rank."""

    def __init__(self, loops: Sequence[EngineLoop]) -> None:
        self.loops = tuple(loops)

    @property
    def dead(self) -> str | None:
        """Why the first of them that ended did, if one did."""
        return next((loop.dead for loop in self.loops if loop.dead is not None), None)

    def pick(self, wanted: bytes | None) -> EngineLoop:
        """The rank that the header names; without one, or if it is no number, as in vLLM the one with the least of four
        times those waiting and those running.

        Raises:
            ApiError: there is no such rank.
        """
        rank = _number(wanted)
        if rank is not None:
            if not 0 <= rank < len(self.loops):
                raise ApiError(f"data_parallel_rank {rank} is out of range [0, {len(self.loops)}).", None)
            return self.loops[rank]
        return min(self.loops, key=lambda loop: 4 * (loop.model.num_waiting + loop.queued) + loop.model.num_running)

    def fail_all(self, reason: str) -> None:
        """End every open call with this reason."""
        for loop in self.loops:
            loop.fail_all(reason)

    def restart(self) -> None:
        """As if the engine had crashed and come back: open calls fail, caches are empty, event numbers begin at 0."""
        for loop in self.loops:
            loop.restart()

    def reset_prefix_cache(self, external: bool) -> bool:
        """See `EngineModel.reset_prefix_cache`, for every rank."""
        done = [loop.model.reset_prefix_cache(external) for loop in self.loops]
        return all(done)


def _number(header: bytes | None) -> int | None:
    try:
        return None if header is None else int(header)
    except ValueError:
        return None
