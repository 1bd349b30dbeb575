"""An engine's event sockets, without the engine; and an index to be told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvhearth.routing.chain import block_keys, chain_seed
from kvhearth.routing.index import KvIndex

BLOCK = 4
WAIT_SECONDS = 10.0


def stored(numbers: list[int], parent: int | None = None, *, first: int = 0, **more: Any) -> dict[str, Any]:
    """Blocks with the hashes ``numbers``, whose tokens count up from ``first``."""
    return {
        "type": "BlockStored",
        "block_hashes": numbers,
        "parent_block_hash": parent,
        "token_ids": list(range(first, first + BLOCK * len(numbers))),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(numbers: list[int], medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": numbers, "medium": medium}


def keys_of(blocks: int, *, salt: str = "", lora: str = "") -> list[int]:
    """Own keys of the first blocks of the tokens that `stored` counts up."""
    return block_keys(list(range(BLOCK * blocks)), BLOCK, chain_seed(lora, salt))


class Publisher:
    """vLLM's sockets: batches go out numbered, and are kept for replay."""

    def __init__(self, kept: int = 10_000) -> None:
        context = zmq.asyncio.Context.instance()
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.kept = kept
        self.number = 0
        self.batches: list[tuple[int, bytes]] = []
        self.replays = 0
        self.replay_pause_seconds = 0.0
        self._task = asyncio.get_running_loop().create_task(self._serve())

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    async def publish(self, *events: dict[str, Any], send: bool = True, ts: float | None = None) -> int:
        """A batch goes out, or with ``send`` False is lost on its way."""
        payload = msgspec.msgpack.encode([time.time() if ts is None else ts, list(events), 0])
        number, self.number = self.number, self.number + 1
        self.batches = [*self.batches, (number, payload)][-self.kept :]
        if send:
            await self.send(number, payload)
        return number

    async def send(self, number: int, payload: bytes) -> None:
        await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def again(self, number: int) -> None:
        """A batch of before goes out."""
        await self.send(number, dict(self.batches)[number])

    def restart(self) -> None:
        self.number, self.batches = 0, []

    async def _serve(self) -> None:
        while True:
            who, _, start = await self._router.recv_multipart()
            self.replays += 1
            for number, payload in self.batches:
                if number >= int.from_bytes(start, "big"):
                    await asyncio.sleep(self.replay_pause_seconds)
                    await self._router.send_multipart([who, b"", b"", number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([who, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._task.cancel()
        self._pub.close(0)
        self._router.close(0)


@pytest.fixture
async def publisher() -> Any:
    made = Publisher()
    yield made
    made.close()


@pytest.fixture
def index() -> KvIndex:
    return KvIndex(max_bytes=1 << 24, now=time.monotonic)


async def eventually(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not reached():
        assert time.monotonic() < deadline, "not reached"
        await asyncio.sleep(0.01)
