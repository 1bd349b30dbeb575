"""Which nodes of a ring hold a key: rendezvous hashing. Pure: knows names and keys, no connections.

Keys are spread one by one, not a chain at a time: a key alone must say where it lives, as a get or a lookup may begin
anywhere in a chain; and chains share heads, so that keeping them together would put the prompts of a whole product on
one node, where spreading gives a long chain the bandwidth of all. Its price, that one node lost cuts every chain, is
paid once: meanwhile a lost node's keys belong to the next in their order (`RingView`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Ring:
    """Nodes, and the order in which each key prefers them (highest random weight: Thaler and Ravishankar, 1998).

    The order follows from the names alone: the same in every process, whatever order they are given in; with a node
    more or less, only the keys that prefer that node move, 1/N of them. Every client must call a node the same.

    Args:
        nodes: their names; one given twice counts once.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = tuple(sorted(set(nodes)))
        self._seeds = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in self.nodes], dtype=np.uint64)

    def owners(self, key: bytes, copies: int = 1) -> tuple[str, ...]:
        """The ``copies`` different nodes that hold ``key``, the most preferred first; fewer where there are not as
        many nodes."""
        return tuple(self.nodes[index] for index in self.place([key], copies)[0])

    def place(self, keys: Sequence[bytes], copies: int, up: Sequence[bool] | None = None) -> NDArray[np.intp]:
        """The owners of many keys at once.

        Args:
            keys: any number.
            copies: nodes a key.
            up: whether each of ``nodes`` is to be used; None, or none of them, for all.

        Returns:
            Indices into ``nodes``, shape (keys, min(copies, nodes to be used)), the most preferred first.
        """
        usable = np.arange(len(self.nodes)) if up is None or not any(up) else np.flatnonzero(up)
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))
        weights = _mixed(hashes[:, None] ^ self._seeds[usable][None, :])
        places = np.empty((len(keys), min(copies, len(usable))), dtype=np.intp)
        rows = np.arange(len(keys))
        for column in range(places.shape[1]):
            best = weights.argmax(axis=1)
            places[:, column] = usable[best]
            weights[rows, best] = 0
        return places


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit of a value; in place (SplitMix64's last step: Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
