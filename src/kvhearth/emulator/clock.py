"""The emulated clock, driven by the wall clock, and the record of how far the emulator fell behind it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

SECOND_NS = 1_000_000_000
_MS_NS = 1_000_000
_WINDOW = 4096


class EmulatedClock:
    """Emulated now = wall time since the start times ``time_scale``, in integer ns.

    Args:
        time_scale: emulated seconds in one wall second, > 0.
        wall_ns: the wall clock, monotonic.
    """

    def __init__(self, time_scale: float, wall_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.time_scale = time_scale
        self._wall_ns = wall_ns
        self._start_ns = wall_ns()

    def now_ns(self) -> int:
        """The emulated time."""
        return int((self._wall_ns() - self._start_ns) * self.time_scale)

    async def sleep_until(self, emulated_ns: int, woken: asyncio.Event | None = None) -> None:
        """Return once the emulated clock has reached ``emulated_ns``, or ``woken`` is set.

        Yields to the event loop at least once. Waits are rounded up to whole milliseconds of the wall clock, the
        resolution of the event loop's timers, rather than spinning through the rest.
        """
        await asyncio.sleep(0)
        while (left_ns := emulated_ns - self.now_ns()) > 0 and not (woken is not None and woken.is_set()):
            wall_seconds = math.ceil(left_ns / self.time_scale / _MS_NS) / 1000
            if woken is None:
                await asyncio.sleep(wall_seconds)
            else:
                await _wait(woken, wall_seconds)


async def _wait(woken: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await woken.wait()
    except TimeoutError:
        return


class Lag:
    """How late steps were handed out, in emulated ns: sum and maximum of all, 99th percentile of the latest 4096."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_ns = 0
        self.max_ns = 0
        self._window: deque[int] = deque(maxlen=_WINDOW)

    def add(self, lag_ns: int) -> None:
        """Record one step."""
        self.steps += 1
        self.total_ns += lag_ns
        self.max_ns = max(self.max_ns, lag_ns)
        self._window.append(lag_ns)

    def p99_ns(self) -> int:
        """99th percentile (nearest rank); 0 before the first step."""
        ranked = sorted(self._window)
        return ranked[math.ceil(0.99 * len(ranked)) - 1] if ranked else 0
