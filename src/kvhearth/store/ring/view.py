"""The nodes of a ring as one client sees them: which are members, which answer, and how it was before.

A node that does not answer is passed over: meanwhile its keys belong to the next node in their order, so that what is
computed again is kept. After any change of who is to be asked, a key that moved is also looked for where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvhearth.store.client.client import StoreClient
from kvhearth.store.ring.placement import Ring

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOOK_BACK_SECONDS = 600.0
"""How long after a change a key is also looked for where it was. It costs a miss of a moved key (1/N of them) one more
round trip; by then what is used again has moved, and the rest would soon be evicted from where it is not asked for."""


class RingView(NamedTuple):
    """One moment. ``clients`` and ``up`` follow ``ring.nodes``."""

    ring: Ring
    clients: tuple[StoreClient, ...] = ()
    up: tuple[bool, ...] = ()
    before: tuple[Ring, tuple[bool, ...]] | None = None
    look_back_until: float = 0.0

    def owners(self, keys: Sequence[bytes], copies: int) -> NDArray[np.intp]:
        """Where ``keys`` belong now: indices into ``clients``, shape (keys, at most ``copies``)."""
        return self.ring.place(keys, copies, self.up)

    def places(self, keys: Sequence[bytes], copies: int, now: float) -> NDArray[np.intp]:
        """Where to look for ``keys`` one after the other: their owners and, for a while after a change, a last column
        with the first owner before it; -1 where that is none else."""
        owners = self.owners(keys, copies)
        if self.before is None or now >= self.look_back_until:
            return owners
        ring, up = self.before
        index = {name: at for at, name in enumerate(self.ring.nodes)}
        now_at = [index.get(name, -1) for name in ring.nodes]
        translation = np.array([at if at >= 0 and self.up[at] else -1 for at in now_at], dtype=np.intp)
        former = translation[ring.place(keys, 1, up)[:, 0]]
        former[(owners == former[:, None]).any(axis=1)] = -1
        return np.column_stack([owners, former]) if (former >= 0).any() else owners


class RingNodes:
    """Keeps the clients of the members, and the view. Thread-safe.

    Args:
        connect: makes a node's client from its name.
        look_back_seconds: see ``LOOK_BACK_SECONDS``.
    """

    def __init__(self, connect: Callable[[str], StoreClient], look_back_seconds: float) -> None:
        self._connect = connect
        self._look_back_seconds = look_back_seconds
        self._lock = threading.Lock()
        self._clients: dict[str, StoreClient] = {}
        self._retired_counts: dict[tuple[str, str], int] = {}
        self._view = RingView(Ring(()))
        self.changes = 0
        """Changes of the members after the first."""

    def set_members(self, names: Iterable[str], now: float) -> None:
        """These are the members from ``now`` on (monotonic seconds); clients of others are closed."""
        ring = Ring(names)
        with self._lock:
            if ring.nodes == self._view.ring.nodes:
                return
            # First what may fail, so that a failure changes nothing.
            self._clients |= {name: self._connect(name) for name in ring.nodes if name not in self._clients}
            retired = [self._clients.pop(name) for name in list(self._clients) if name not in ring.nodes]
            self.changes += bool(self._view.ring.nodes)
            self._change(ring, now)
            for client in retired:
                _add(self._retired_counts, client.counts)
        for client in retired:
            client.close()

    def counts(self) -> dict[tuple[str, str], int]:
        """Outcomes of all nodes so far, those of former members included."""
        with self._lock:
            totals = dict(self._retired_counts)
            clients = list(self._clients.values())
        for client in clients:
            _add(totals, client.counts)
        return totals

    def view(self, now: float) -> RingView:
        """The nodes at ``now``."""
        view = self._view
        if view.up == tuple([not client.is_down for client in view.clients]):
            return view
        with self._lock:
            self._change(self._view.ring, now)
            return self._view

    def close(self) -> None:
        """Close every client."""
        for client in self._view.clients:
            client.close()

    def _change(self, ring: Ring, now: float) -> None:
        old = self._view
        clients = tuple(self._clients[name] for name in ring.nodes)
        up = tuple(not client.is_down for client in clients)
        if (ring.nodes, up) == (old.ring.nodes, old.up):
            return
        before = (old.ring, old.up) if old.clients else None
        self._view = RingView(ring, clients, up, before, now + self._look_back_seconds)


def _add(totals: dict[tuple[str, str], int], counts: dict[tuple[str, str], int]) -> None:
    for key, number in counts.items():
        totals[key] = totals.get(key, 0) + number
