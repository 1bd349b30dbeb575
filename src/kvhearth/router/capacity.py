"""How many requests an engine may have at once: learned from its reports, and few while it is cold or on trial."""

from __future__ import annotations

import math

FIRST_SHARE = 0.1
"""Of the mean load of the warm engines, for one that has come up just now."""


class Capacity:
    """Of one engine. ``most`` is what counts; the rest is where it comes from.

    An engine that reports more waiting requests than ``backlog`` is full with those that it had without the surplus.
    It is asked at intervals only, so the number holds until a report with room left raises it.
    """

    __slots__ = ("_cold", "_learned", "_on_trial", "most")

    def __init__(self, most: int) -> None:
        self._learned = 0  # 0: no bound
        self._cold = 0
        self._on_trial = False
        self.most = most

    @property
    def learned(self) -> int:
        """Requests with which it was full by its own report; 0 when it was not lately."""
        return self._learned

    def reported(self, in_flight: int, waiting: int, backlog: int, most: int) -> None:
        """The engine told how many requests wait there.

        Args:
            in_flight: requests that this router has there.
            waiting: those waiting there, whoever sent them.
            backlog: how many may; 0 for any number.
            most: bound in any case.
        """
        if not backlog:
            self._learned = 0
        elif waiting >= backlog:
            self._learned = max(1, in_flight - (waiting - backlog))
        elif self._learned:
            enough = not waiting and 2 * in_flight < self._learned
            self._learned = 0 if enough else max(self._learned, in_flight + backlog - waiting)
        self.settle(most)

    def warming(self, share: float, mean_in_flight: float, most: int) -> None:
        """It has come up not long ago; ``share`` (0 to 1) of its way to a full part is behind it."""
        self._cold = 0 if share >= 1 else 1 + math.ceil(max(share, FIRST_SHARE) * mean_in_flight)
        self.settle(most)

    def on_trial(self, most: int, *, on_trial: bool) -> None:
        """Its breaker lets one request through at a time, or does so no more."""
        self._on_trial = on_trial
        self.settle(most)

    def settle(self, most: int) -> None:
        """Work out ``most`` anew; the argument bounds it in any case."""
        bounds = [most]
        if self._learned:
            bounds.append(self._learned)
        if self._cold:
            bounds.append(self._cold)
        if self._on_trial:
            bounds.append(1)
        self.most = min(bounds)
