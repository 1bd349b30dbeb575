"""Faults on demand: what an emulated engine does wrong on purpose, for trying out what stands in front of it.

State and dice only; the endpoints, the publisher and the loop ask it.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import msgspec

RATES = ("error_rate", "abort_rate", "drop_events", "duplicate_events", "reorder_events")
MAX_SLOW_MS = 600_000.0


class FaultSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What goes wrong; the default is nothing.

    Attributes:
        hang: ``requests``: generating endpoints take requests and never answer; ``everything``: no endpoint answers but
            ``/emulator/…``.
        slow_ms: milliseconds of the wall clock before a generating request reaches the engine.
        error_rate: share of generating requests answered with ``error_status`` at once.
        error_status: 500 to 599.
        abort_rate: share of generating requests whose connection is cut ``abort_after_pieces`` pieces into the stream,
            or instead of a whole answer.
        abort_after_pieces: 0 = after the headers.
        drop_events: share of event batches that are not published (a replay has them).
        duplicate_events: share of event batches that are published twice.
        reorder_events: share of event batches that are published after the next one.
        stale_metrics: ``/metrics`` shows what it showed when this was set.
        seed: of the dice.
    """

    hang: Literal["", "requests", "everything"] = ""
    slow_ms: float = 0.0
    error_rate: float = 0.0
    error_status: int = 503
    abort_rate: float = 0.0
    abort_after_pieces: int = 1
    drop_events: float = 0.0
    duplicate_events: float = 0.0
    reorder_events: float = 0.0
    stale_metrics: bool = False
    seed: int = 0


class Faults:
    """The faults of one emulator.

    Attributes:
        settings: replaced as a whole.
        happened: how often each kind has happened.
    """

    def __init__(self) -> None:
        self.settings = FaultSettings()
        self.happened: dict[str, int] = dict.fromkeys(("hang", "slow_ms", *RATES, "stale_metrics", "restart"), 0)
        self._dice = random.Random(0)

    def change(self, values: dict[str, Any]) -> None:
        """Set some, leave the rest.

        Raises:
            ValueError: an unknown fault, or a value that cannot be; nothing has changed.
        """
        settings = msgspec.convert({**msgspec.to_builtins(self.settings), **values}, FaultSettings)
        for name in RATES:
            if not 0.0 <= getattr(settings, name) <= 1.0:
                raise ValueError(f"{name}={getattr(settings, name)}: give a share from 0 to 1")
        if not 0.0 <= settings.slow_ms <= MAX_SLOW_MS:
            raise ValueError(f"slow_ms={settings.slow_ms}: give 0 to {MAX_SLOW_MS:.0f}")
        if not 500 <= settings.error_status <= 599:
            raise ValueError(f"error_status={settings.error_status}: give 500 to 599")
        if settings.abort_after_pieces < 0:
            raise ValueError(f"abort_after_pieces={settings.abort_after_pieces}: give 0 or more")
        self.settings = settings
        self._dice = random.Random(settings.seed)

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        self.settings = FaultSettings()

    def happens(self, rate: str) -> bool:
        """Throw the dice for one of `RATES`."""
        share: float = getattr(self.settings, rate)
        if not share or self._dice.random() >= share:
            return False
        self.happened[rate] += 1
        return True

    def note(self, kind: str) -> None:
        """A fault without dice has happened."""
        self.happened[kind] += 1

    def state(self) -> dict[str, Any]:
        """Settings and counts, for GET."""
        return {"faults": msgspec.to_builtins(self.settings), "happened": dict(self.happened)}
