"""The tasks that look at engines: for each, one that checks its health and one that reads its load."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvhearth.router.probe import LoadProbe, Probe

if TYPE_CHECKING:
    from kvhearth.router.config import RouterConfig
    from kvhearth.router.engines import Engine
    from kvhearth.router.fleet import Fleet
    from kvhearth.router.instruments import Instruments


class Watches:
    """Owned by the router. Engines are watched until they are gone, those too that only end what they have."""

    def __init__(self, fleet: Fleet, instruments: Instruments, config: RouterConfig) -> None:
        self._fleet = fleet
        self._instruments = instruments
        self._config = config
        self._tasks: dict[Engine, list[asyncio.Task[None]]] = {}

    def add(self, engine: Engine) -> asyncio.Task[None]:
        """Watch an engine; the task returned is its first check."""
        config, key = self._config, self._config.key_for_engines
        probe = Probe(engine, self._fleet, config.health, key)
        failed = self._instruments.load_report_failed
        load = LoadProbe(engine, self._fleet, config.health, key, config.queue.engine_backlog, failed)
        first = asyncio.create_task(probe.check())
        self._tasks[engine] = [
            first,
            asyncio.create_task(self._after(first, probe)),
            asyncio.create_task(load.watch()),
        ]
        return first

    def first(self, engine: Engine) -> asyncio.Task[None]:
        """The first check of an engine that is watched."""
        return self._tasks[engine][0]

    async def _after(self, first: asyncio.Task[None], probe: Probe) -> None:
        await asyncio.wait([first])
        await probe.watch()

    async def end(self, engine: Engine) -> None:
        """Watch it no more."""
        await _cancel(self._tasks.pop(engine, []))

    async def follow(self, config: RouterConfig) -> None:
        """Watch all of them by other settings from now on."""
        self._config = config
        engines = list(self._tasks)
        await self.stop()
        for engine in engines:
            self.add(engine)

    async def stop(self) -> None:
        """Watch nobody any more."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        self._tasks.clear()
        await _cancel(tasks)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
