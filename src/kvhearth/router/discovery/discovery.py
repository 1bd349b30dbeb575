"""All that tells of engines, in one set: those that are named, and those that sources find."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvhearth.metrics import MetricFamily
from kvhearth.metrics import router_discovery as names
from kvhearth.router.config import Discovery as Settings
from kvhearth.router.discovery.dns import DnsSource
from kvhearth.router.discovery.file import FileSource
from kvhearth.router.discovery.member import MOST_MEMBERS, Member
from kvhearth.router.discovery.source import Source

log = logging.getLogger(__name__)

FIRST_SECONDS = 6.0
"""How long a start waits for the first answers."""


class Discovery:
    """Merges named engines and sources; where two tell of one name, the named and then the earlier one counts."""

    def __init__(self, settings: Settings, named: Sequence[Member] = ()) -> None:
        self._named = tuple(named)
        self._sources = _sources(settings)
        self._tasks: list[asyncio.Task[None]] = []
        self._tell: Callable[[Sequence[Member]], None] | None = None
        self._twice: set[str] = set()
        self.members: list[Member] = []
        self._merge()

    @property
    def complete(self) -> bool:
        """Whether every source has told at least once."""
        return all(source.known for source in self._sources)

    async def start(self, tell: Callable[[Sequence[Member]], None]) -> None:
        """Ask every source once, for a bounded time, and go on asking; ``tell`` gets all members at each change."""
        self._tell = tell
        self._tasks = [asyncio.create_task(source.run(self._changed)) for source in self._sources]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                for source in self._sources:
                    await source.looked.wait()

    async def stop(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def name(self, named: Sequence[Member]) -> None:
        """Other engines are named from now on."""
        self._named = tuple(named)
        self._changed()

    def status(self) -> list[dict[str, Any]]:
        """Of each source: how it is, for an operator."""
        now = time.monotonic()
        return [
            {
                "source": source.name,
                "ok": not source.last_error,
                "answered": source.known,
                "members": len(source.members),
                "good_seconds_ago": now - source.good_at,
                "last_error": source.last_error or None,
            }
            for source in self._sources
        ]

    def metrics(self) -> Iterable[MetricFamily]:
        """For the registry."""
        now = time.monotonic()
        members = [(("named",), float(len(self._named)))]
        members += [((source.name,), float(len(source.members))) for source in self._sources]
        yield MetricFamily(names.MEMBERS, members)
        failures = [
            ((source.name, reason), float(count))
            for source in self._sources
            for reason, count in source.failures.items()
        ]
        yield MetricFamily(names.FAILURES, failures)
        yield MetricFamily(names.AGE_SECONDS, [((source.name,), now - source.good_at) for source in self._sources])

    def _changed(self) -> None:
        before = self.members
        self._merge()
        if self._tell is not None and (self.members != before or self.complete):
            self._tell(self.members)

    def _merge(self) -> None:
        merged: dict[str, Member] = {}
        for members in (self._named, *[source.members for source in self._sources]):
            for member in members:
                if member.name not in merged:
                    merged[member.name] = member
                elif member.name not in self._twice and len(self._twice) < MOST_MEMBERS:
                    self._twice.add(member.name)
                    log.warning("engine %s is told of twice; the first counts", member.name)
        self.members = list(merged.values())[:MOST_MEMBERS]


def _sources(settings: Settings) -> list[Source]:
    sources: list[Source] = []
    if settings.file is not None:
        sources.append(FileSource(settings.file))
    if settings.dns:
        sources.append(DnsSource(settings.dns, settings.dns_interval_seconds, settings.kv_events_port))
    return sources
