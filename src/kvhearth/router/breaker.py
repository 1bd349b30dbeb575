"""When an engine is left alone for a while, by what became of its requests. Health checks are `probe`'s."""

from __future__ import annotations

from collections import deque
from typing import Literal

from kvhearth.router.config import Resilience

State = Literal["closed", "open", "half_open"]

REMEMBERED = 50
"""Answers that the share of errors is taken over."""
ENOUGH = 20
"""Answers below which a share says nothing."""


class Breaker:
    """Opens after failures in a row, or when too large a share of answers are its errors. The engine then gets nothing
    for a while, and after that one request at a time until one succeeds; if it fails the while doubles.
    """

    __slots__ = (
        "_errors",
        "_failures",
        "_half_open_at",
        "_last",
        "_open_seconds",
        "_settings",
        "clean",
        "opened",
        "state",
    )

    def __init__(self, settings: Resilience) -> None:
        self._settings = settings
        self.state: State = "closed"
        self.opened = 0
        """Times that it has opened."""
        self._open_seconds = settings.open_seconds
        self._half_open_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self.clean = self.state == "closed"
        """Nothing bad is remembered: answers without error need not be told."""
        self._failures = 0
        self._last: deque[bool] = deque(maxlen=REMEMBERED)
        self._errors = 0

    def follow(self, settings: Resilience) -> None:
        """Other settings from now on."""
        self._settings = settings
        self._open_seconds = min(self._open_seconds, settings.longest_open_seconds)

    def answered(self, now: float, *, is_error: bool) -> bool:
        """The engine gave a whole answer, or began one; ``is_error``: of status 5xx. True when the state changed."""
        if self.state == "open" or (self.clean and not is_error):
            return False  # of a request from before; or all is well
        self._failures = 0
        if is_error:
            return self._failed(now) if self.state == "half_open" else self._count(now, is_error=True)
        if self.state == "half_open":
            self._close()
            return True
        return self._count(now, is_error=False)

    def failed(self, now: float) -> bool:
        """A request got no answer: refused, cut, not HTTP, late. True when the state changed."""
        if self.state == "open":
            return False
        if self.state == "half_open":
            return self._failed(now)
        self.clean = False
        self._failures += 1
        if self._failures >= self._settings.failures_to_open:
            return self._failed(now)
        return self._count(now, is_error=True)

    def tick(self, now: float) -> bool:
        """Half open when its time has come. True when the state changed."""
        if self.state != "open" or now < self._half_open_at:
            return False
        self.state = "half_open"
        return True

    def reset(self) -> bool:
        """The engine has started anew: nothing counts any more. True when the state changed."""
        was_closed = self.state == "closed"
        self._close()
        return not was_closed

    def _count(self, now: float, *, is_error: bool) -> bool:
        last = self._last
        if len(last) == REMEMBERED:
            self._errors -= last[0]
        last.append(is_error)
        self._errors += is_error
        self.clean = not (self._errors or self._failures)
        if self.clean:
            last.clear()
        if is_error and len(last) >= ENOUGH and self._errors >= self._settings.error_share * len(last):
            return self._failed(now)
        return False

    def _failed(self, now: float) -> bool:
        self.state = "open"
        self.opened += 1
        self._half_open_at = now + self._open_seconds
        self._open_seconds = min(2 * self._open_seconds, self._settings.longest_open_seconds)
        self._begin()
        return True

    def _close(self) -> None:
        self.state = "closed"
        self._open_seconds = self._settings.open_seconds
        self._begin()
