"""The thread that looks after a ring: re-reads its members, and asks nodes that are passed over if they are back."""

from __future__ import annotations

import logging
import random
import threading
import time
from functools import partial

from kvhearth.store.ring.fan_out import FanOut
from kvhearth.store.ring.members import Members
from kvhearth.store.ring.view import RingNodes

_log = logging.getLogger(__name__)

_TEND_SECONDS = 0.25
_PROBE_SECONDS = 0.5
_PROBE_THREADS = 4
_JOIN_SECONDS = 3.0


class RingKeeper:
    """Begins at once.

    Args:
        members: where the nodes come from.
        nodes: what to keep up to date.
        timeout_seconds: how long one look at ``members`` may take.
    """

    def __init__(self, members: Members, nodes: RingNodes, timeout_seconds: float) -> None:
        self._members = members
        self._nodes = nodes
        self._timeout_seconds = timeout_seconds
        self._probes = FanOut(_PROBE_THREADS)
        if not members.nodes:
            members.refresh(timeout_seconds)
        nodes.set_members(members.nodes, time.monotonic())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvhearth-store-ring", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; waits for what it is at, a few seconds at most."""
        self._closed.set()
        self._thread.join(_JOIN_SECONDS)
        self._probes.close()

    def _run(self) -> None:
        look_at = time.monotonic() + self._members.interval_seconds
        while not self._closed.wait(min(_TEND_SECONDS, self._members.interval_seconds)):
            try:
                if time.monotonic() >= look_at:
                    self._look_at_members()
                    look_at = time.monotonic() + self._members.interval_seconds
                self._probe()
            except Exception:
                _log.exception("looking after a ring failed; it is tried again")

    def _look_at_members(self) -> None:
        if self._members.refresh(self._timeout_seconds):
            _log.info("the ring's nodes are now %s", ", ".join(self._members.nodes))
        self._nodes.set_members(self._members.nodes, time.monotonic())

    def _probe(self) -> None:
        """Their breakers say how often a node is really asked."""
        view = self._nodes.view(time.monotonic())
        down = [client for client, up in zip(view.clients, view.up, strict=True) if not up]
        random.shuffle(down)
        calls = [partial(client.ping, timeout_seconds=_PROBE_SECONDS) for client in down]
        self._probes.run(calls, time.monotonic() + _PROBE_SECONDS)
