"""What all ways of finding engines have in common: the last good set, and how a failure is counted and said once."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

from kvhearth.router.discovery.member import Member

log = logging.getLogger(__name__)


class Unavailable(Exception):
    """A source cannot be read now. ``reason`` is its label in metrics; the text says more."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


class Source(ABC):
    """Looks again and again; whatever goes wrong, the last good set stays.

    Args:
        name: of the kind, and its label in metrics.
        interval_seconds: between two looks.
        now: monotonic seconds.
    """

    def __init__(self, name: str, interval_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.members: Sequence[Member] = ()
        self.known = False
        """Whether it has ever told its members."""
        self.looked = asyncio.Event()
        """It has looked once, with or without success."""
        self.last_error = ""
        self.failures: Counter[str] = Counter()
        self.good_at = now()
        self._interval_seconds = interval_seconds
        self._now = now

    @abstractmethod
    async def look(self) -> Sequence[Member] | None:
        """The members now, or None where nothing can have changed; raises Unavailable."""

    async def run(self, changed: Callable[[], None]) -> None:
        """Look for ever; ``changed`` is called after a look that found other members, and after the first good one."""
        while True:
            await self.once(changed)
            self.looked.set()
            await asyncio.sleep(self._interval_seconds)

    async def once(self, changed: Callable[[], None]) -> None:
        """Look once."""
        try:
            found = await self.look()
        except Unavailable as error:
            self._failed(error.reason, str(error))
            return
        except Exception as error:
            log.exception("%s cannot tell of engines", self.name)
            self._failed("fault", str(error))
            return
        self.good_at = self._now()
        if self.last_error:
            log.info("%s tells of engines again", self.name)
            self.last_error = ""
        if found is not None and (not self.known or list(found) != list(self.members)):
            self.members = tuple(found)
            self.known = True
            changed()

    def _failed(self, reason: str, text: str) -> None:
        self.failures[reason] += 1
        if text != self.last_error:
            log.warning("%s cannot tell of engines, those known stay: %s", self.name, text)
            self.last_error = text
