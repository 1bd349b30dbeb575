"""How often requests may be tried again, over all of them, so that an outage does not multiply the load."""

from __future__ import annotations

from kvhearth.router.config import Resilience


class RetryBudget:
    """Every request adds a part of a retry, up to a burst; every retry takes a whole one."""

    def __init__(self, settings: Resilience) -> None:
        self.follow(settings)
        self._saved = float(settings.retry_burst)

    def follow(self, settings: Resilience) -> None:
        """Other settings from now on."""
        self._share = settings.retry_share
        self._burst = float(settings.retry_burst)

    @property
    def saved(self) -> float:
        """Retries that may be made now."""
        return self._saved

    def request(self) -> None:
        """A request has come."""
        saved = self._saved + self._share
        self._saved = saved if saved < self._burst else self._burst

    def take(self) -> bool:
        """Whether a retry may be made; if so it counts."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
