"""What each request knows of the store behind the engine's DRAM: asked a step at a time, answered a step or more later.

Follows `kvhearth.connector`'s store tier, with one difference: the store is asked how many leading keys it has, so
what follows the first key that it lacks counts as missing too. Bytes, and the answers, come through `Transfers`.
"""

from __future__ import annotations

from kvhearth.engine.ports import Transfers
from kvhearth.engine.request import RequestState

MOST_PROMOTIONS = 2
"""Times one request may have the same chunk fetched. vLLM has no bound: a chain longer than DRAM, whose head is evicted
for its tail, would be fetched for ever."""


class StoreTier:
    """Lookups of one engine's requests.

    Args:
        dram_chunks: capacity of the engine's DRAM; one request may have chunks fetched for half of it.
    """

    def __init__(self, dram_chunks: int) -> None:
        self._most_promoted = max(1, dram_chunks // 2)
        self._asking: list[RequestState] = []
        self.answered_at_once = False

    def take_answers(self, request: RequestState, transfers: Transfers) -> None:
        """See whether what the request asked in earlier steps is answered."""
        request.batches = [batch for batch in request.batches if not self._answered(request, batch, transfers)]

    def lookup(self, request: RequestState, key: int) -> bool | None:
        """Whether the store has the chunk for the request, which will then fetch it; None: not known yet."""
        times = request.promoted.get(key, 0)
        if times >= MOST_PROMOTIONS or (not times and len(request.promoted) >= self._most_promoted):
            return False
        if key not in request.known:
            if not request.asking:
                self._asking.append(request)
            request.asking.append(key)
            request.known[key] = None
        found = request.known[key]
        if found:
            request.promoted[key] = times + 1
        return found

    def send(self, transfers: Transfers) -> None:
        """The step ends: ask the store what its requests want to know."""
        self.answered_at_once = False
        for request in self._asking:
            batch = tuple(request.asking)
            request.asking.clear()
            if self._answered(request, batch, transfers):
                self.answered_at_once = True
            else:
                request.batches.append(batch)
        self._asking.clear()

    def failed(self, request: RequestState, keys: tuple[int, ...]) -> None:
        """Promised chunks did not come: the request must not hope for them any more."""
        if request.known:
            request.known.update(dict.fromkeys(keys, False))

    def forget(self, request: RequestState, transfers: Transfers) -> None:
        """The request is past its lookups, starts over, or is gone."""
        if request.known:
            request.known.clear()
            request.batches.clear()
            transfers.forget(request.request_id)

    def _answered(self, request: RequestState, batch: tuple[int, ...], transfers: Transfers) -> bool:
        leading = transfers.lookup(request.request_id, batch)
        if leading is None:
            return False
        for index, key in enumerate(batch):
            if request.known[key] is None:
                request.known[key] = index < leading
        return True
