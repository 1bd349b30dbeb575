"""Follows a router's configuration while it runs: reads the file again when it changes, and keeps the last good one.

What a configuration means to a running router is the router's business; this decides when one is handed to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvhearth.errors import UserError
from kvhearth.router.config import RouterConfig
from kvhearth.router.settings.table import LEAVES, Leaf

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
READ_SECONDS = 30.0

_Stamp = tuple[int, int, int, int]


def _name(leaf: Leaf) -> str:
    return "listen" if leaf.path in ("listen_host", "listen_port") else leaf.path


NEEDS_RESTART = frozenset(_name(leaf) for leaf in LEAVES if leaf.metadata["restart"])
"""Settings, by dotted name, that a running router cannot change."""


def changed(old: RouterConfig, new: RouterConfig) -> list[str]:
    """Dotted names of the settings that differ, each once, in the order of the help."""
    names = [_name(leaf) for leaf in LEAVES if _value(leaf, old) != _value(leaf, new)]
    return list(dict.fromkeys(names))


def _value(leaf: Leaf, config: RouterConfig) -> Any:
    value = config.policy_name if leaf.path == "policy" else leaf.of(config)
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else value


class Outcome(NamedTuple):
    """How a reload ended."""

    changed: list[str]
    """Dotted names of the settings that are different now."""
    error: str
    """Why nothing was changed; "" when all is well."""


class Reloader:
    """Reads the configuration again when its file changes, and when it is asked to.

    A configuration that cannot be read, or that changes what needs a restart, is refused as a whole: the one in force
    stays, and a later good one is taken. A changed file is read once it has looked the same twice, so that it is not
    read while somebody still writes it.

    Args:
        path: the file that is looked at; None: there is none, and only `ask` and `reload` read again.
        read: reads it anew, with the flags and the environment over it. Runs in a thread.
        apply: puts a configuration in force, of which only what may change live differs; may be a coroutine function.
        in_force: the configuration that the router has been started with.
        clock: the time of day, in seconds since the epoch.
        poll_seconds: how often `watch` looks at the file.
    """

    def __init__(
        self,
        path: Path | None,
        read: Callable[[], RouterConfig],
        apply: Callable[[RouterConfig], Awaitable[None] | None],
        in_force: RouterConfig,
        clock: Callable[[], float] = time.time,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.in_force = in_force
        self.generation = 1
        """Configurations that have been in force, this one too."""
        self.loaded_at = clock()
        """When what is in force was last found to be what is written, in seconds since the epoch."""
        self.failures = 0
        """Reloads that were refused."""
        self.last_error = ""
        """Why the last reload was refused; "" when it was not."""
        self._path = path
        self._read = read
        self._apply = apply
        self._clock = clock
        self._poll_seconds = poll_seconds
        self._asked = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._seen: _Stamp | None = None
        self._taken: _Stamp | None = None
        self._was_read = False

    def ask(self) -> None:
        """Have `watch` reload now; for SIGHUP."""
        self._asked.set()

    async def watch(self) -> None:
        """Reload whenever that is due, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._asked.wait()
            try:
                if self._asked.is_set():
                    self._asked.clear()
                    await self.reload()
                else:
                    await self.look()
            except Exception:  # a bug of ours must not end the following of the file
                log.exception("the configuration could not be reloaded")

    async def look(self) -> Outcome | None:
        """Reload if the file has changed and has come to rest; None where there was nothing to do."""
        if self._path is None:
            return None
        before, self._seen = self._seen, _stamp(self._path)
        if self._was_read and (self._seen == self._taken or self._seen != before):
            return None
        return await self.reload()

    async def reload(self) -> Outcome:
        """Read again whatever is written, and put it in force."""
        async with self._one_at_a_time:
            if self._path is not None:
                self._seen = self._taken = _stamp(self._path)
            self._was_read = True
            try:
                names = await self._follow()
            except UserError as error:
                return self._refused(str(error))
            except Exception as bug:
                self._refused(f"this is a bug: {type(bug).__name__}")
                raise
            self.loaded_at = self._clock()
            if self.last_error:
                log.info("the configuration can be read again")
            self.last_error = ""
            return Outcome(names, "")

    async def _follow(self) -> list[str]:
        where = str(self._path or "configuration")
        try:
            async with asyncio.timeout(READ_SECONDS):
                config = await asyncio.to_thread(self._read)
        except TimeoutError:
            what = f"reading took more than {READ_SECONDS:g} s"
            raise UserError(what, where=where, remedy="see what keeps its disk") from None
        names = changed(self.in_force, config)
        fixed = [name for name in names if name in NEEDS_RESTART]
        if fixed:
            what = f"{', '.join(fixed)} cannot change while the router runs"
            raise UserError(what, where=where, remedy="restart the router, or take that change back")
        if names:
            applied = self._apply(config)
            if inspect.isawaitable(applied):
                await applied
            self.in_force = config
            self.generation += 1
            log.info("configuration %d is in force; changed: %s", self.generation, ", ".join(names))
        return names

    def _refused(self, error: str) -> Outcome:
        self.failures += 1
        if error != self.last_error:
            log.warning("the configuration stays as it was: %s", error)
        self.last_error = error
        return Outcome([], error)


def _stamp(path: Path) -> _Stamp | None:
    """What changes with a file, also where it is reached through a link that is replaced; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
