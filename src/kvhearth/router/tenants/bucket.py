"""A token bucket: so much a minute, and no more than a minute's worth at once. Time comes in as an argument."""

from __future__ import annotations


class Bucket:
    """``per_minute`` units flow in evenly; ``None``: no bound. What was overspent is owed, up to a minute's worth."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int | None, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute or 0)
        self._at = now

    def remaining(self, now: float) -> float:
        """What may be taken now; not for a bucket without bound."""
        self._flow(now)
        return self._level

    def wait_seconds(self, amount: float, now: float) -> float:
        """How long until that much may be taken: 0 for now, infinity for never."""
        if self.per_minute is None:
            return 0.0
        self._flow(now)
        if amount <= self._level:
            return 0.0
        if amount > self.per_minute:
            return float("inf")
        return (amount - self._level) * 60 / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """That much was used, whether it was there or not; a negative amount is given back."""
        if self.per_minute is not None:
            self._flow(now)
            most = float(self.per_minute)
            self._level = min(most, max(self._level - amount, -most))

    def _flow(self, now: float) -> None:
        most = float(self.per_minute or 0)
        self._level = min(most, self._level + max(0.0, now - self._at) * most / 60)
        self._at = max(self._at, now)
