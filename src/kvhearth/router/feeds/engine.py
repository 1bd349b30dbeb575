"""Follows the KV events of one target: an engine, or one data-parallel rank of it. What is lost heals: by the engine's
replay, else by the connector's snapshot, else by forgetting what was known and learning anew.

vLLM numbers its batches from 0 at each start and publishes them over ZeroMQ, which may drop some for a slow reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from kvhearth.router.feeds.ports import FeedState, Index
from kvhearth.router.feeds.snapshot import SnapshotError, ask_snapshot
from kvhearth.router.feeds.wire import AllBlocksCleared, Batch, Event, apply, decode
from kvhearth.store.protocol.address import parse_address

log = logging.getLogger(__name__)

SILENT_SECONDS = 10.0
"""Traffic without any event for so long says that events are configured in one place only."""

REORDER_SECONDS = 0.1
"""How long a batch that came early waits for those before it."""

_MOST_EARLY = 256
_EVENTS_AT_ONCE = 32
_QUEUE = 10_000
"""Batches that wait to be read, as many as vLLM keeps to replay: at some 6 kB each, memory that must be bounded."""

_REPLAY_SECONDS, _REPLAY_FIRST_SECONDS, _REPLAY_PAUSE_SECONDS = 60.0, 10.0, 1.0
_SNAPSHOT_SECONDS = 30.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_LAST = (-1).to_bytes(8, "big", signed=True)


class EngineFeed:
    """Tells the index what one target holds, until it is stopped.

    Args:
        target: its name in the index.
        events: ``tcp://host:port`` of its event socket.
        index: to be told.
        replay: ``tcp://host:port`` of its replay socket; "" = none.
        snapshot: ``host:port`` of the connector's snapshot; "" = none.
        snapshot_token: bearer token for that; "" = none.
        wall: Unix time in seconds, for the lag.
        now: seconds, never going back.
    """

    def __init__(
        self,
        target: str,
        events: str,
        index: Index,
        *,
        replay: str = "",
        snapshot: str = "",
        snapshot_token: str = "",
        wall: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self._events, self._replay, self._snapshot, self._token = events, replay, snapshot, snapshot_token
        self._index = index
        self._wall, self._now = wall, now
        self._next = 0
        """Number of the batch that should come next."""
        self._heard_at = 0.0
        self._early: dict[int, bytes] = {}
        self._early_since = 0.0
        self._asked_since: float | None = None
        self._restarted = self._was_cleared = False
        self._task: asyncio.Task[None] | None = None
        self.state = FeedState()

    # ---- for the router

    def start(self) -> None:
        """Begin to follow."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """Tell nothing more, from this moment on."""
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """End; what was told stays told."""
        self.cancel()
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def asked(self) -> None:
        """A request that should change what the target holds was sent there."""
        if self._asked_since is None:
            self._asked_since = self._now()

    @property
    def silent(self) -> bool:
        """Whether it gets requests and tells nothing."""
        return self._asked_since is not None and self._now() - self._asked_since > SILENT_SECONDS

    def restarted(self) -> None:
        """The engine was gone: forget it, and take what comes for new."""
        self._forget()
        self._next = 0
        self._heard_at = 0.0
        self._early.clear()
        self._asked_since = None
        self._restarted = True

    # ---- following

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            began = self._now()
            try:
                await self._follow()
            except Exception:
                log.exception("the KV events of %s cannot be followed; trying again", self.target)
            if self._now() - began > _LONGEST_PAUSE_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _follow(self) -> None:
        with zmq.asyncio.Context.instance().socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, _QUEUE)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._events)
            await self._catch_up()
            while True:
                frames = await self._receive(socket)
                if self._restarted:
                    self._restarted = False
                    await self._catch_up()
                if frames is not None:
                    await self._take(frames)
                    await asyncio.sleep(0)  # a message that waits is had without waiting: let others run
                elif self._early:
                    await self._heal()
                if self._was_cleared:
                    self._was_cleared = False
                    await self._snapped()

    async def _receive(self, socket: zmq.asyncio.Socket) -> list[bytes] | None:
        """A message; None when a batch that came early has waited long enough."""
        if not self._early:
            return await socket.recv_multipart()
        left = self._early_since + REORDER_SECONDS - self._now()
        if left > 0 and len(self._early) < _MOST_EARLY:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    return await socket.recv_multipart()
        return None

    async def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self.state.ignored["unreadable"] += 1
            return
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        if number < self._next and not self._is_of_new_start(payload):
            self.state.duplicates += 1  # or late, and told by a replay meanwhile
            return
        if number > self._next:
            if not self._early:
                self._early_since = self._now()
            self._early[number] = payload
        else:
            self._tell(number, payload)
            await self._take_early()

    def _is_of_new_start(self, payload: bytes) -> bool:
        """Whether a batch with an old number is newer than all: the engine counts from 0 again. Forgets it then."""
        batch = self._read(payload)
        if batch is None or batch.at <= self._heard_at:
            return False
        self.state.restarts += 1
        log.info("%s has started again", self.target)
        self._forget()
        self._early.clear()
        self._next = 0
        return True

    async def _take_early(self) -> None:
        while (payload := self._early.pop(self._next, None)) is not None:
            self._tell(self._next, payload)
            await asyncio.sleep(0)
        if self._early:
            self._early_since = self._now()

    def _tell(self, number: int, payload: bytes, *, live: bool = True) -> None:
        self._next = number + 1
        batch = self._read(payload)
        if batch is None:
            return
        self._heard_at = max(self._heard_at, batch.at)
        if live:
            self.state.lag_seconds = max(0.0, self._wall() - batch.at)
        self.state.batches += 1
        self._apply(batch.events, whole=False)
        if self._snapshot and any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self._was_cleared = True  # DRAM may hold what it held
        if self._asked_since is not None:
            self._asked_since = None
            self._index.set_silence(self.target, "")

    def _read(self, payload: bytes) -> Batch | None:
        try:
            batch = decode(payload)
        except ValueError:
            self.state.ignored["unreadable"] += 1
            return None
        if batch.unread:
            self.state.ignored["unknown_event"] += batch.unread
        return batch

    def _apply(self, events: Sequence[Event], *, whole: bool) -> None:
        state = self.state
        for event in events:
            why_not = apply(event, self.target, self._index, whole=whole)
            if why_not:
                state.ignored[why_not] += 1
            else:
                state.events[type(event).__name__] += 1

    def _forget(self) -> None:
        self._index.forget(self.target)

    # ---- healing

    async def _catch_up(self) -> None:
        """What the target has held since before we listened."""
        if not self._replay or not await self._replayed(self._next):
            await self._snapped()

    async def _heal(self) -> None:
        """Batches are missing between what was told and what came early."""
        missing = self._next
        if self._replay and await self._replayed(missing):
            self.state.healed["replay"] += 1
        elif await self._snapped():
            self.state.healed["snapshot"] += 1
        else:
            self.state.healed["relearn"] += 1
            self._forget()
        if self._early:
            self._next = max(self._next, min(self._early))
            for number in [number for number in self._early if number < self._next]:
                del self._early[number]
            await self._take_early()

    async def _replayed(self, first: int) -> bool:
        """Ask the engine for its batches from ``first`` on; whether nothing is missing now that can be had.

        An engine that has let go of the first ones gives a beginning in the middle: what it tells is true, but what was
        known before may not be, so that is forgotten, unless a snapshot knows it all.
        """
        try:
            async with asyncio.timeout(_REPLAY_SECONDS):
                with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
                    socket.setsockopt(zmq.LINGER, 0)
                    socket.setsockopt(zmq.RCVHWM, _QUEUE)
                    socket.connect(self._replay)
                    asked = -1
                    while (
                        asked < self._next
                    ):  # the engine's own queue for us is short: what it dropped is asked for again
                        asked = self._next
                        await socket.send_multipart([b"", asked.to_bytes(8, "big")])
                        if not await self._take_replay(socket, first):
                            return False
        except (TimeoutError, zmq.ZMQError) as error:
            log.warning("no replay of KV events from %s: %s", self.target, str(error) or "it did not answer in time")
            self.state.failures["replay"] += 1
            return False
        return self._next > first or first == 0

    async def _take_replay(self, socket: zmq.asyncio.Socket, first: int) -> bool:
        """One answer to its end; False when it begins too late and a snapshot will know more."""
        begun = False
        while True:
            frames = await self._next_of_replay(socket, begun=begun)
            if frames is None or len(frames) < 3 or frames[-2] == _LAST:
                return True
            begun = True
            number = int.from_bytes(frames[-2], "big")
            if number > self._next == first:
                if self._snapshot:
                    return False
                self.state.healed["relearn"] += bool(first)
                self._forget()
                self._next = number
            if number == self._next:
                self._tell(number, frames[-1], live=False)
                await asyncio.sleep(0)

    @staticmethod
    async def _next_of_replay(socket: zmq.asyncio.Socket, *, begun: bool) -> list[bytes] | None:
        """The next message; None when an answer that has begun breaks off, its end too may have been dropped."""
        if not begun:
            async with asyncio.timeout(_REPLAY_FIRST_SECONDS):
                return await socket.recv_multipart()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPLAY_PAUSE_SECONDS):
                return await socket.recv_multipart()
        return None

    async def _snapped(self) -> bool:
        """Put the connector's snapshot in place of what is known; whether there was one."""
        if not self._snapshot:
            return False
        try:
            payload = await ask_snapshot(parse_address(self._snapshot), self._token, _SNAPSHOT_SECONDS)
        except SnapshotError as error:
            log.warning("no snapshot from %s: %s", self.target, error)
            self.state.failures["snapshot"] += 1
            return False
        batch = self._read(payload)
        if batch is None:
            return False
        self._forget()
        self._heard_at = max(self._heard_at, batch.at)
        for start in range(0, len(batch.events), _EVENTS_AT_ONCE):
            self._apply(batch.events[start : start + _EVENTS_AT_ONCE], whole=True)
            await asyncio.sleep(0)
        self._index.set_silence(self.target, "")
        return True
