"""One question to many nodes of a ring: split by where the keys are, asked side by side, and put together again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvhearth.store.client.client import StoreClient
from kvhearth.store.ring.fan_out import FanOut
from kvhearth.store.ring.view import RingView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_T = TypeVar("_T")

_THREADS = 32
ABSENT = b"-"
"""In place of a tier's letter: nowhere, as far as is known."""


class RingCalls:
    """Thread-safe.

    Args:
        copies: nodes that keep each row.
    """

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._fan_out = FanOut(_THREADS)

    def close(self) -> None:
        """Let the threads end."""
        self._fan_out.close()

    def until(self, deadline: float, column: int, columns: int) -> float:
        """Until when to ask the nodes of this column of places: the first of two copies leaves half of the time to the
        other. One copy has all of it, and a look back what is left."""
        now = time.monotonic()
        return now + (deadline - now) / max(1, min(self._copies, columns) - column)

    def ask(
        self,
        view: RingView,
        parts: dict[int, list[int]],
        call: Callable[[StoreClient, list[int], float], _T],
        deadline: float,
    ) -> list[_T | None]:
        """Call each node with its part, side by side; None where the deadline passed before its turn."""

        def ask(node: int, part: list[int]) -> _T | None:
            left = deadline - time.monotonic()
            return call(view.clients[node], part, left) if left > 0 else None

        return self._fan_out.run([partial(ask, node, part) for node, part in parts.items()], deadline)

    def where(self, view: RingView, keys: Sequence[bytes], places: NDArray[np.intp], deadline: float) -> bytes:
        """The tier of each key, a letter each, at the first of its places that has it; ``-`` for none."""
        letters = bytearray(ABSENT * len(keys))
        wanted = list(range(len(keys)))

        def ask_where(client: StoreClient, part: list[int], seconds: float) -> bytes:
            return client.where([keys[index] for index in part], timeout_seconds=seconds)

        for column in range(places.shape[1]):
            parts = by_node(places[:, column : column + 1], wanted)
            answers = self.ask(view, parts, ask_where, self.until(deadline, column, places.shape[1]))
            for part, found in zip(parts.values(), answers, strict=True):
                for index, letter in zip(part, found or b"", strict=False):
                    letters[index] = letter
            wanted = [index for index in wanted if letters[index] == ABSENT[0]]
        return bytes(letters)

    def leading(self, view: RingView, keys: Sequence[bytes], places: NDArray[np.intp], deadline: float) -> bytes:
        """The tier of each leading key that there is, a letter each."""
        if places.shape[1] > 1:
            return self.where(view, keys, places, deadline).partition(ABSENT)[0]

        def ask_leading(client: StoreClient, part: list[int], seconds: float) -> bytes:
            return client.match_tiers([keys[index] for index in part], timeout_seconds=seconds)

        # Where each key has but one place, nodes need not look beyond the first key that they lack: the chain ends at
        # the first of which none of them tells.
        letters = bytearray(ABSENT * len(keys))
        parts = by_node(places)
        for part, found in zip(parts.values(), self.ask(view, parts, ask_leading, deadline), strict=True):
            for index, letter in zip(part, found or b"", strict=False):
                letters[index] = letter
        return bytes(letters).partition(ABSENT)[0]


def by_node(places: NDArray[np.intp], wanted: Iterable[int] | None = None) -> dict[int, list[int]]:
    """Which rows of ``places`` (those wanted; None: all) name each node."""
    parts: dict[int, list[int]] = {}
    rows = places.tolist()
    for index in range(len(rows)) if wanted is None else wanted:
        for node in rows[index]:
            if node >= 0:
                parts.setdefault(node, []).append(index)
    return parts
