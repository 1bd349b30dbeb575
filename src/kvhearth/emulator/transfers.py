"""The engine's transfers by the emulated clock: modelled times, and behind them the real store when there is one.

A job is done at its modelled time, or when the store has really answered if that is later; the difference is store lag,
and read lag where requests wait for it (lookups and fetches).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvhearth.emulator.store_io import Reply, StoreIo
from kvhearth.engine.links import ModelledLinks
from kvhearth.engine.ports import Job, JobDone, JobKind

RECHECK_NS = 5_000_000
"""Between two questions for chunks that were promised, as the connector asks."""


class _Waiting(NamedTuple):
    """What is under way: its modelled end and, if the store takes part, the store's reply."""

    modelled_ns: int
    order: int
    job: Job
    reply: Reply | None

    def end_ns(self) -> int | None:
        """When it is over; None = the store has not answered yet."""
        if self.reply is None:
            return self.modelled_ns
        return None if self.reply.at_ns is None else max(self.modelled_ns, self.reply.at_ns)


class _Lookup(NamedTuple):
    modelled_ns: int
    reply: Reply

    def end_ns(self) -> int | None:
        return None if self.reply.at_ns is None else max(self.modelled_ns, self.reply.at_ns)


class EngineTransfers:
    """The `Transfers` port of an emulated engine.

    Args:
        links: modelled times.
        store: the real store; None in modes none and native, where the engine looks nothing up.
        on_job: told of each finished job and its modelled duration in ns.
    """

    def __init__(self, links: ModelledLinks, store: StoreIo | None, on_job: Callable[[Job, int], None]) -> None:
        self.store_lag_ns = 0
        self.store_read_lag_ns = 0
        self._links = links
        self._store = store
        self._on_job = on_job
        self._now_ns = 0
        self._order = 0
        self._due: list[_Waiting] = []
        self._overdue: list[_Waiting] = []
        self._done: list[JobDone] = []
        self._loads_from_ns = 0
        self._lookups: dict[tuple[str, tuple[int, ...]], _Lookup] = {}
        self._found: dict[str, dict[tuple[int, ...], int]] = {}
        self._promised: dict[str, int] = {}
        self._started: dict[int, int] = {}

    def wake_with(self, loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
        """Have ``news`` set on ``loop`` whenever the store has answered something."""
        if self._store is not None:

            def notify() -> None:
                loop.call_soon_threadsafe(news.set)

            self._store.notify = notify

    def promised(self, request_id: str, until_ns: int) -> None:
        """Another engine is putting this request's chunks into the store: they are asked for again until then."""
        if self._store is not None:
            self._promised = {name: until for name, until in self._promised.items() if until > self._now_ns}
            self._promised[request_id] = until_ns

    def begin_step(self, now_ns: int) -> None:
        """A step begins at this emulated time: everything over by then is what the engine may learn in it."""
        self._now_ns = now_ns
        while self._due and self._due[0].modelled_ns <= now_ns:
            self._overdue.append(heapq.heappop(self._due))
        if self._overdue:
            self._report(now_ns)
        if self._lookups:
            self._answer(now_ns)

    def next_event_ns(self) -> int | None:
        """When the engine can next learn something that it could not in its last step; None = not known."""
        times = [waiting.end_ns() for waiting in self._overdue]
        times += [lookup.end_ns() for lookup in self._lookups.values()]
        if self._due:
            times.append(self._due[0].modelled_ns)
        return min((time_ns for time_ns in times if time_ns is not None), default=None)

    # ---- the port

    def lookup(self, request_id: str, keys: Sequence[int]) -> int | None:
        """See `kvhearth.engine.ports.Transfers`."""
        if self._store is None:
            return 0
        wanted = tuple(keys)
        found = self._found.get(request_id, {}).get(wanted)
        if found is None and (request_id, wanted) not in self._lookups:
            asked = _Lookup(self._links.lookup_ns(self._now_ns), self._store.match(wanted))
            self._lookups[request_id, wanted] = asked
        return found

    def start(self, job: Job) -> None:
        """See `kvhearth.engine.ports.Transfers`."""
        reply = None
        if self._store is not None and job.kind is JobKind.FETCH:
            reply = self._store.fetch(job.keys)
        elif self._store is not None and job.kind is JobKind.PUT:
            reply = self._store.put(job.keys)
        self._order += 1
        self._started[job.job_id] = self._now_ns
        from_ns = max(self._now_ns, self._loads_from_ns) if job.kind is JobKind.LOAD else self._now_ns
        modelled_ns = self._links.done_ns(from_ns, job)
        heapq.heappush(self._due, _Waiting(modelled_ns, self._order, job, reply))

    def flush(self, job_ids: Sequence[int]) -> int:
        """See `kvhearth.engine.ports.Transfers`."""
        ends_ns = [waiting.modelled_ns for waiting in self._due if waiting.job.job_id in job_ids]
        self._loads_from_ns = max(ends_ns, default=self._now_ns)
        return max(0, self._loads_from_ns - self._now_ns)

    def finished(self) -> Sequence[JobDone]:
        """See `kvhearth.engine.ports.Transfers`."""
        done, self._done = self._done, []
        return done

    def forget(self, request_id: str) -> None:
        """See `kvhearth.engine.ports.Transfers`."""
        self._found.pop(request_id, None)
        self._promised.pop(request_id, None)
        for asked in [asked for asked in self._lookups if asked[0] == request_id]:
            del self._lookups[asked]

    # ---- internals

    def _report(self, now_ns: int) -> None:
        over: list[tuple[int, _Waiting]] = []
        still: list[_Waiting] = []
        for waiting in self._overdue:
            end_ns = waiting.end_ns()
            if end_ns is not None and end_ns <= now_ns:
                over.append((end_ns, waiting))
            else:
                still.append(waiting)
        self._overdue = still
        over.sort(key=lambda pair: (pair[0], pair[1].order))
        for end_ns, waiting in over:
            job = waiting.job
            self.store_lag_ns += end_ns - waiting.modelled_ns
            if job.kind is JobKind.FETCH:
                self.store_read_lag_ns += end_ns - waiting.modelled_ns
            keys_ok = len(job.keys) if waiting.reply is None else waiting.reply.count
            self._on_job(job, waiting.modelled_ns - self._started.pop(job.job_id))
            self._done.append(JobDone(job.job_id, keys_ok))

    def _store_match(self, keys: Sequence[int]) -> Reply:
        assert self._store is not None  # noqa: S101 - without one nothing is looked up
        return self._store.match(keys)

    def _answer(self, now_ns: int) -> None:
        for (request_id, keys), lookup in list(self._lookups.items()):
            end_ns = lookup.end_ns()
            if end_ns is not None and end_ns <= now_ns:
                del self._lookups[request_id, keys]
                self.store_lag_ns += end_ns - lookup.modelled_ns
                self.store_read_lag_ns += end_ns - lookup.modelled_ns
                if lookup.reply.count < len(keys) and now_ns < self._promised.get(request_id, 0):
                    again_ns = self._links.lookup_ns(now_ns + RECHECK_NS)
                    self._lookups[request_id, keys] = _Lookup(again_ns, self._store_match(keys))
                else:
                    self._found.setdefault(request_id, {})[keys] = lookup.reply.count
