"""The engine loop: steps the clockless engine model by the emulated clock and hands its tokens out when they exist.

Steps run back to back in emulated time: the next begins exactly where the last ended, however late the loop woke up, so
a busy machine delays the handing out (that is lag, and counted) but bends no modelled time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from kvhearth.emulator.announcer import Announcer
from kvhearth.emulator.answers import Answer, Call, Hashing
from kvhearth.emulator.clock import SECOND_NS, EmulatedClock, Lag
from kvhearth.emulator.exposition import RequestMetrics
from kvhearth.emulator.publisher import EventPublisher
from kvhearth.emulator.transfers import EngineTransfers
from kvhearth.emulator.wire import Event
from kvhearth.engine.model import EngineModel
from kvhearth.engine.ports import Step
from kvhearth.engine.validate import check_request

MAX_OPEN_ANSWERS = 8192
MAX_OPEN_TOKENS = 1 << 25
"""Prompt and output tokens of open answers, each about ten bytes of text and hashes."""

_LONGEST_WAIT_SECONDS = 1.0

_log = logging.getLogger(__name__)


class EngineBusyError(Exception):
    """More answers are open than the emulator keeps."""


class EngineLoop:
    """Owns the engine model of one rank; everything runs on one event loop.

    Args:
        make: makes the engine, and its port, which is told the emulated time before each step.
        hashing: how its prompts become block hashes.
        clock: the emulated clock.
        metrics: told of first tokens, gaps and ends.
        announcer, publisher: for its KV events; None = it has none.
    """

    def __init__(
        self,
        make: Callable[[], tuple[EngineModel, EngineTransfers]],
        hashing: Hashing,
        clock: EmulatedClock,
        metrics: RequestMetrics,
        *,
        announcer: Announcer | None = None,
        publisher: EventPublisher | None = None,
    ) -> None:
        self.model, self.transfers = make()
        self.hashing = hashing
        self.clock = clock
        self.publisher = publisher
        self.lag = Lag()
        self.aborted = 0
        self.dead: str | None = None
        self._make = make
        self._announcer = announcer
        self._metrics = metrics
        self._news = asyncio.Event()
        self._arrivals: deque[Answer] = deque()
        self._open: dict[str, Answer] = {}
        self._unscheduled: dict[str, Answer] = {}
        self._open_tokens = 0
        self._at_ns = 0
        self.transfers.wake_with(asyncio.get_running_loop(), self._news)

    @property
    def queued(self) -> int:
        """Answers that have arrived and that the model has not been told of yet."""
        return len(self._arrivals)

    def check_room(self, answers: int, tokens: int) -> None:
        """See that so many further answers, of so many tokens in all, may be open.

        Raises:
            EngineBusyError: they may not.
        """
        if len(self._open) + answers > MAX_OPEN_ANSWERS:
            raise EngineBusyError(f"{len(self._open)} requests are open: at most {MAX_OPEN_ANSWERS}")
        if self._open_tokens + tokens > MAX_OPEN_TOKENS:
            raise EngineBusyError(f"requests of {self._open_tokens} tokens are open: at most {MAX_OPEN_TOKENS}")

    def submit(self, call: Call) -> None:
        """Take a call in; its arrival is now.

        Raises:
            UserError: a prompt that HBM can never hold.
        """
        for answer in call.answers:
            check_request(answer.request, self.model.config)
        now_ns = self.clock.now_ns()
        for answer in call.answers:
            answer.arrival_ns = now_ns
            self._open[answer.request.request_id] = answer
            self._open_tokens += answer.tokens
            if call.await_seconds:
                self.transfers.promised(answer.request.request_id, now_ns + int(call.await_seconds * SECOND_NS))
            self._arrivals.append(answer)
        self._news.set()

    def abort(self, call: Call) -> None:
        """Drop what is unfinished of a call whose client went away."""
        for answer in call.answers:
            request_id = answer.request.request_id
            if self._open.pop(request_id, None) is None:
                continue
            self._open_tokens -= answer.tokens
            self.aborted += 1
            self._metrics.aborted()
            self._unscheduled.pop(request_id, None)
            if answer in self._arrivals:
                self._arrivals.remove(answer)
            else:
                self.model.abort(request_id)
        self._news.set()

    def fail_all(self, reason: str) -> None:
        """End every open call with this reason, and refuse further ones."""
        self.dead = reason
        self._fail_open(reason)

    def restart(self) -> None:
        """As if the engine had crashed and come back: open calls fail, HBM and DRAM are empty, its counters and the
        numbers of its events begin at 0. Histograms of requests go on."""
        self._fail_open("the engine restarted")
        self.model, self.transfers = self._make()
        self.transfers.wake_with(asyncio.get_running_loop(), self._news)
        if self._announcer is not None:
            self._announcer.forget()
        if self.publisher is not None:
            self.publisher.restart()
        self._news.set()

    async def run(self) -> None:
        """Run until cancelled, or all has failed. A defect in the model ends it: open calls fail, and ``dead`` says
        why."""
        try:
            while self.dead is None:
                await self._turn()
        except asyncio.CancelledError:
            self.fail_all("the server is shutting down")
            raise
        except Exception as error:
            _log.exception("the engine loop ended")
            self.fail_all(f"the engine loop ended: {error!r}")

    def _fail_open(self, reason: str) -> None:
        for answer in self._open.values():
            answer.call.fail(reason)
        self._open.clear()
        self._open_tokens = 0
        self._unscheduled.clear()
        self._arrivals.clear()

    async def _turn(self) -> None:
        self._admit()
        if not self.model.has_work:
            await self._until_arrival()
            return
        self.transfers.begin_step(self._at_ns)
        model = self.model
        step = model.step(self.transfers)
        events: list[Event] = []
        if step.kv_events and self._announcer is not None:
            events = self._announcer.translate(step.kv_events, self._open)
        for request_id in [waiting for waiting in self._unscheduled if waiting in step.scheduled]:
            self._unscheduled.pop(request_id).scheduled_ns = self._at_ns
        if step.duration_ns == 0:
            self._publish(events)
            if step.waiting_on_transfers:
                await self._until_news()
            else:
                await asyncio.sleep(0)  # it only preempted: the next step gets on
            return
        end_ns = self._at_ns + step.duration_ns
        await self.clock.sleep_until(end_ns)
        self._at_ns = end_ns
        if self.model is model:
            self._hand_out(step, end_ns)
            self._publish(events)

    def _admit(self) -> None:
        if self._arrivals and not self.model.has_work:
            self._at_ns = max(self._at_ns, self._arrivals[0].arrival_ns)
        while self._arrivals and self._arrivals[0].arrival_ns <= self._at_ns:
            answer = self._arrivals.popleft()
            self.model.submit(answer.request)
            self._unscheduled[answer.request.request_id] = answer

    async def _until_arrival(self) -> None:
        if not self._arrivals:
            self._news.clear()
            await self._news.wait()

    async def _until_news(self) -> None:
        """Nothing can be scheduled: go to the next arrival or transfer, wherever in emulated time that is."""
        if not self._arrivals:
            self._news.clear()
            event_ns = self.transfers.next_event_ns()
            if event_ns is None:  # a real answer is out, whose time is not known
                event_ns = self.clock.now_ns() + int(_LONGEST_WAIT_SECONDS * SECOND_NS * self.clock.time_scale)
            await self.clock.sleep_until(event_ns, self._news)
        times_ns = [answer.arrival_ns for answer in list(self._arrivals)[:1]]
        if (event_ns := self.transfers.next_event_ns()) is not None:
            times_ns.append(event_ns)
        if times_ns and min(times_ns) <= self.clock.now_ns():
            self._at_ns = max(self._at_ns, min(times_ns))

    def _publish(self, events: list[Event]) -> None:
        if events and self.publisher is not None:
            self.publisher.publish(events)

    def _hand_out(self, step: Step, end_ns: int) -> None:
        self.lag.add(max(0, self.clock.now_ns() - end_ns))
        for done in step.finished:
            if (answer := self._open.get(done.request_id)) is not None:
                answer.finished = done
        gaps: dict[int, int] = {}
        for request_id in step.sampled:
            answer = self._open.get(request_id)
            if answer is None:
                continue
            if answer.produced:
                gap_ns = end_ns - answer.last_ns
                gaps[gap_ns] = gaps.get(gap_ns, 0) + 1
            else:
                answer.first_ns = end_ns
                self._metrics.first_token(answer)
            answer.last_ns = end_ns
            answer.produced += 1
            if answer.produced >= answer.wake_at:
                answer.call.wake()
        self._metrics.gaps(gaps)
        for done in step.finished:
            if (answer := self._open.pop(done.request_id, None)) is not None:
                self._open_tokens -= answer.tokens
                self._metrics.finished(answer, done)
