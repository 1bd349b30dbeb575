"""Publishes KV events over ZeroMQ as vLLM does: numbered batches on a PUB socket, missed ones again from a ROUTER.

See ``ZmqEventPublisher`` in ``vllm/distributed/kv_events.py``. It also carries out the faults that concern events.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from kvhearth.emulator.faults import Faults
from kvhearth.emulator.wire import Event, EventBatch
from kvhearth.errors import UserError

END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
MAX_BUFFER_STEPS = 1_000_000


class KvEventsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's ``--kv-events-config``.

    Attributes:
        enable_kv_cache_events: publish at all.
        publisher: ``zmq`` or ``null``; None = ``zmq`` when enabled.
        endpoint: of the first rank; each further rank has the next port. With ``*`` it is bound, where the engine
            listens for HTTP; with port 0 to a free one, which ``/emulator/state`` names. Another host is connected to.
        replay_endpoint: where missed batches can be asked for; always bound.
        buffer_steps: batches kept for that.
        hwm: messages queued for a slow subscriber, beyond which it loses some.
        max_queue_size: accepted for vLLM's sake: nothing is queued before the socket here.
        topic: first frame of every message.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        """Whether there is anything to open."""
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_kv_events_config(text: str) -> KvEventsConfig:
    """Read the flag's JSON.

    Raises:
        UserError: it is no such object, or a value cannot work.
    """
    where = "kv_events_config"
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        remedy = 'give a JSON object such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
        raise UserError(f"{text!r}: {error}", where=where, remedy=remedy) from None
    if config.publisher not in (None, "null", "zmq"):
        raise UserError(f"publisher {config.publisher!r} is unknown", where=where, remedy="choose zmq or null")
    for name in ("endpoint", "replay_endpoint"):
        value = getattr(config, name)
        if value is not None:
            rank_endpoint(value, 0, where=f"{where}.{name}")
    if not 0 < config.buffer_steps <= MAX_BUFFER_STEPS:
        raise UserError(f"{config.buffer_steps}", where=f"{where}.buffer_steps", remedy=f"give 1 to {MAX_BUFFER_STEPS}")
    if config.hwm < 0:
        raise UserError(f"{config.hwm}", where=f"{where}.hwm", remedy="give 0 or more")
    return config


def rank_endpoint(endpoint: str, rank: int, *, where: str) -> str:
    """The endpoint of a data-parallel rank: the port after the last rank's; a free port stays one.

    Raises:
        UserError: it is neither ``tcp://host:port`` nor ``ipc://path``.
    """
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not base.removeprefix("tcp://") or not port.isdigit():
        raise UserError(f"{endpoint!r} is no endpoint", where=where, remedy="write tcp://*:5557 or ipc:///path")
    number = int(port) + rank if int(port) else 0
    if number > 65_535:
        raise UserError(f"{endpoint!r} has no port {number} for rank {rank}", where=where, remedy="choose a lower port")
    return f"{base}:{number}"


class EventPublisher:
    """The event sockets of one data-parallel rank. All calls on the event loop; none blocks.

    Args:
        config: enabled.
        rank: which one.
        host: what ``*`` in an endpoint stands for.
        faults: what goes wrong on purpose.

    Raises:
        UserError: an endpoint cannot be had.
    """

    def __init__(self, config: KvEventsConfig, rank: int, host: str, faults: Faults) -> None:
        self._rank = rank
        self._faults = faults
        self._topic = config.topic.encode()
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._held: list[bytes] | None = None
        self._encode: Callable[[EventBatch], bytes] = msgspec.msgpack.Encoder().encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self._replay: zmq.asyncio.Socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self.replay_endpoint: str | None = None
        self.batches = 0
        self._pub = self._context.socket(zmq.PUB)
        try:
            self._pub.set_hwm(config.hwm)
            self.endpoint = _open(self._pub, config.endpoint, rank, host, always_bind=False)
            if config.replay_endpoint is not None:
                self._replay = zmq.asyncio.Socket(self._context, zmq.ROUTER)
                # vLLM leaves this at 1,000, and so loses what a replay has beyond that.
                self._replay.set_hwm(config.buffer_steps + 1)
                self.replay_endpoint = _open(self._replay, config.replay_endpoint, rank, host, always_bind=True)
                self._serving = asyncio.create_task(self._serve(self._replay))
        except BaseException:
            self._close_sockets()
            raise

    def publish(self, events: Sequence[Event]) -> None:
        """Send one step's events as the next batch."""
        payload = self._encode(EventBatch(time.time(), list(events), self._rank))
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._buffer.append((sequence, payload))
        self.batches += 1
        faults = self._faults
        if faults.happens("drop_events"):
            return
        message = [self._topic, sequence.to_bytes(8, "big"), payload]
        held, self._held = self._held, None
        if held is None and faults.happens("reorder_events"):
            self._held = message
            return
        self._send(message)
        if faults.happens("duplicate_events"):
            self._send(message)
        if held is not None:
            self._send(held)

    def restart(self) -> None:
        """As after a restart of the engine: numbers begin at 0, and nothing earlier can be asked for."""
        self._sequence = 0
        self._held = None
        self._buffer.clear()

    async def close(self) -> None:
        """Close the sockets; what is not sent is lost."""
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()

    def _send(self, message: list[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            self._pub.send_multipart(message, flags=zmq.NOBLOCK)

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        """Answer requests for batches from a number on, the last answer being number -1."""
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for sequence, payload in list(self._buffer):
                if sequence >= start:
                    await socket.send_multipart([client, b"", self._topic, sequence.to_bytes(8, "big"), payload])
            await socket.send_multipart([client, b"", b"", END_SEQUENCE, b""])


def _open(
    socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str, rank: int, host: str, always_bind: bool
) -> str:
    """Bind or connect as vLLM decides it; returns the endpoint to be used by others."""
    address = rank_endpoint(endpoint, rank, where="kv_events_config")
    binds = always_bind or "*" in address or address.startswith("ipc://")
    literal = f"[{host}]" if ":" in host else host
    address = address.replace("*", literal)
    try:
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        if not binds:
            socket.connect(address)
            return address
        socket.bind(address)
    except zmq.ZMQError as error:
        raise UserError(f"{address}: {error}", where="kv_events_config", remedy="choose another endpoint") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
