"""When to start again what died: a rule over lifetimes. No clock and no process in here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How patiently a child is restarted; all times in seconds.

    Args:
        first_delay_seconds: wait after the first death; doubles with each further one.
        longest_delay_seconds: bound of the doubling.
        healthy_seconds: a life this long makes the next delay the first one again.
        short_life_seconds: a life shorter than this, counted from readiness, is "died at once".
        patience: deaths at once in a row after which the child is given up and only retried slowly.
        slow_retry_seconds: the wait between those retries.
    """

    first_delay_seconds: float = 0.2
    longest_delay_seconds: float = 10.0
    healthy_seconds: float = 60.0
    short_life_seconds: float = 5.0
    patience: int = 5
    slow_retry_seconds: float = 60.0


class Backoff:
    """The deaths of one child so far, and the wait that follows from them."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._delay_seconds = policy.first_delay_seconds
        self._short_lives = 0

    @property
    def given_up(self) -> bool:
        """Whether it died at once so often that it is only retried slowly."""
        return self._short_lives >= self._policy.patience

    def died(self, ready_for_seconds: float) -> float:
        """Count a death after being ready for so long (0: never was); returns the seconds to wait before a restart."""
        policy = self._policy
        if ready_for_seconds >= policy.healthy_seconds:
            self._delay_seconds = policy.first_delay_seconds
        self._short_lives = self._short_lives + 1 if ready_for_seconds < policy.short_life_seconds else 0
        if self.given_up:
            return policy.slow_retry_seconds
        delay = self._delay_seconds
        self._delay_seconds = min(2 * delay, policy.longest_delay_seconds)
        return delay
