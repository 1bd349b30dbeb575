"""Calls side by side on a bounded number of threads, under one deadline. Knows nothing of stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

_T = TypeVar("_T")


class FanOut:
    """Thread-safe.

    Args:
        threads: most calls at once, beside those that callers run themselves.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvhearth-store-ring")

    def run(self, calls: Sequence[Callable[[], _T]], deadline: float) -> list[_T | None]:
        """Results in order; None for a call that found no thread before ``deadline`` (monotonic seconds) and will not
        be made. Each call must end by ``deadline`` itself: none is left running, as it may write to a caller's buffer.

        Raises:
            Whatever a call raises, once all have ended.
        """
        others = [self._start(call) for call in calls[1:]]
        own = [_Task(call) for call in calls[:1]]
        for task in own:
            task.run()
        for future in others:
            try:
                future.exception(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                if not future.cancel():
                    future.exception()
        ended = [*(task.future for task in own), *others]
        return [None if future.cancelled() else future.result() for future in ended]

    def close(self) -> None:
        """Let the threads end; later calls are run by their callers."""
        self._pool.shutdown(wait=False)

    def _start(self, call: Callable[[], _T]) -> Future[_T]:
        task = _Task(call)
        try:
            self._pool.submit(task.run)
        except RuntimeError:  # closed, or out of threads: then it is queued all the same
            task.run()
        return task.future


class _Task(Generic[_T]):
    """A call that is made once or not at all."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self.future: Future[_T] = Future()
        self._call = call
        self._claim = threading.Lock()

    def run(self) -> None:
        if not self._claim.acquire(blocking=False) or not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._call())
        except Exception as error:
            self.future.set_exception(error)
