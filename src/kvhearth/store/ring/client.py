"""The client of a ring of stores: the same calls as `StoreClient`, over all nodes at once.

A store is a cache: a node that fails costs its keys a miss, or a look at their other copy, within the call's deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvhearth.metrics import MetricFamily
from kvhearth.metrics import store as m
from kvhearth.metrics import store_ring as mr
from kvhearth.store.client.client import MAX_RECORD_BYTES, PIN_SECONDS, Put, StoreClient
from kvhearth.store.client.outcomes import GetResult, MissReason, PutResult, RecordResult
from kvhearth.store.protocol.header import Header
from kvhearth.store.ring.calls import ABSENT, RingCalls, by_node
from kvhearth.store.ring.keeper import RingKeeper
from kvhearth.store.ring.members import Members
from kvhearth.store.ring.repair import Repairs
from kvhearth.store.ring.view import LOOK_BACK_SECONDS, RingNodes, RingView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

_T = TypeVar("_T")

_ASK_NEXT = frozenset(
    {
        MissReason.ABSENT,
        MissReason.TIMEOUT,
        MissReason.UNREACHABLE,
        MissReason.BREAKER_OPEN,
        MissReason.BUSY,
        MissReason.CHECKSUM,
        MissReason.REFUSED,
        MissReason.PROTOCOL,
    }
)
"""Misses after which another node may have the row: all but those that say something of the row itself."""
_COUNTED_HERE = ("get", "put", "ping")
_LACKING = frozenset({MissReason.ABSENT, MissReason.CHECKSUM})


class StoreRing:
    """Stores that share the keys between them, seen from an engine. Thread-safe.

    Args:
        members: the nodes.
        connect: makes a node's client from its name.
        copies: nodes that keep each row, 1 or 2. With 2 a put is sent twice, and a miss asks twice.
        timeout_seconds: how long a call may take in all, unless it says otherwise.
        look_back_seconds: how long after a change of nodes a key is also looked for where it was.
    """

    def __init__(
        self,
        members: Members,
        connect: Callable[[str], StoreClient],
        *,
        copies: int = 1,
        timeout_seconds: float = 1.0,
        look_back_seconds: float = LOOK_BACK_SECONDS,
    ) -> None:
        if copies not in (1, 2) or timeout_seconds <= 0:
            raise ValueError(f"copies={copies}, timeout_seconds={timeout_seconds}: want 1 or 2, and more than 0")
        self._copies = copies
        self._timeout_seconds = timeout_seconds
        self._nodes = RingNodes(connect, look_back_seconds)
        self._calls = RingCalls(copies)
        self._repairs = Repairs()
        self._count_lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._copies_lost = 0
        self._found_elsewhere = 0
        self._keeper = RingKeeper(members, self._nodes, timeout_seconds)

    # ---- rows

    def get_into(self, key: bytes, buffer: Buffer, *, timeout_seconds: float | None = None) -> GetResult:
        """Fetch one row into ``buffer`` (writable, contiguous); see `get_many_into`."""
        return self.get_many_into([key], [buffer], timeout_seconds=timeout_seconds)[0]

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer], *, timeout_seconds: float | None = None
    ) -> list[GetResult]:
        """Fetch rows, each into its buffer; one result a key, in order.

        A row that its first node lacks and another has is put back to the first, later, if there is room for that.

        Raises:
            ValueError: bad key, not one buffer a key, or a read-only buffer.
        """
        return self._get(keys, buffers, timeout_seconds, repair=True)

    def put(self, key: bytes, header: Header, row: Buffer, *, timeout_seconds: float | None = None) -> PutResult:
        """Store one row; see `put_many`."""
        return self.put_many([Put(key, header, row)], timeout_seconds=timeout_seconds)[0]

    def put_many(self, puts: Sequence[Put], *, timeout_seconds: float | None = None) -> list[PutResult]:
        """Store rows, each on ``copies`` nodes; one result a row, in order: stored when at least one node has it.

        Raises:
            ValueError: bad key, or a header field out of range.
        """
        deadline = self._deadline(timeout_seconds)
        view = self._nodes.view(time.monotonic())
        owners = view.owners([put.key for put in puts], self._copies)
        results = [PutResult(MissReason.UNREACHABLE) for _ in puts]
        copies = [0] * len(puts)

        def put_part(client: StoreClient, part: list[int], seconds: float) -> list[PutResult]:
            return client.put_many([puts[index] for index in part], timeout_seconds=seconds)

        parts = by_node(owners)
        for part, answers in zip(parts.values(), self._calls.ask(view, parts, put_part, deadline), strict=True):
            for index, result in zip(part, answers or [PutResult(MissReason.BUSY)] * len(part), strict=True):
                copies[index] += result.stored
                if not copies[index] or result.stored:
                    results[index] = result
        lost = sum(0 < number < min(self._copies, len(view.clients)) for number in copies)
        self._count("put", [result.reason for result in results])
        with self._count_lock:
            self._copies_lost += lost
        return results

    # ---- questions

    def match(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """How many leading ``keys`` there are, on whichever nodes (touching them), as far as they can be asked."""
        return len(self.match_tiers(keys, timeout_seconds=timeout_seconds))

    def match_tiers(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> bytes:
        """The tier of each leading key that there is, a letter each: ``d`` DRAM, ``k`` disk, ``o`` object."""
        deadline, view, places = self._look_for(keys, timeout_seconds)
        return self._calls.leading(view, keys, places, deadline)

    def where(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> bytes:
        """The tier of each key, a letter each as in `match_tiers`; ``-`` for those that are nowhere, as far as the
        nodes can be asked."""
        deadline, view, places = self._look_for(keys, timeout_seconds)
        return self._calls.where(view, keys, places, deadline)

    def exists_many(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> list[bool]:
        """Whether there is each of ``keys`` (touching them), as far as the nodes can be asked."""
        return [letter != ABSENT[0] for letter in self.where(keys, timeout_seconds=timeout_seconds)]

    def exists(self, key: bytes, *, timeout_seconds: float | None = None) -> bool:
        """Whether there is ``key``, as far as the nodes can be asked."""
        return self.exists_many([key], timeout_seconds=timeout_seconds)[0]

    def prefetch(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """Have ``keys`` lifted to DRAM on the nodes that are asked for them first; how many that concerns."""
        return self._sum(StoreClient.prefetch, keys, 1, timeout_seconds)

    def pin(self, keys: Sequence[bytes], *, seconds: int = PIN_SECONDS, timeout_seconds: float | None = None) -> int:
        """Keep values from eviction for so many seconds, wherever there is a copy; how many of ``keys`` are pinned now,
        at least."""
        return self._sum(partial(StoreClient.pin, seconds=seconds), keys, self._copies, timeout_seconds)

    def unpin(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> int:
        """Let values be evicted again; how many of ``keys`` were pinned, at least."""
        return self._sum(StoreClient.unpin, keys, self._copies, timeout_seconds)

    def delete(self, key: bytes, *, timeout_seconds: float | None = None) -> bool:
        """Drop ``key``; True when it was there."""
        answers = self._ask_all(lambda client, seconds: client.delete(key, timeout_seconds=seconds), timeout_seconds)
        return any(answers.values())

    def delete_many(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> bool:
        """Drop ``keys`` on every node, as one may have been left where it used to belong; whether every node that
        answers has done so."""
        answers = self._ask_all(
            lambda client, seconds: client.delete_many(keys, timeout_seconds=seconds), timeout_seconds
        )
        return bool(answers) and all(answers.values())

    # ---- records

    def put_record(self, key: bytes, record: bytes, *, timeout_seconds: float | None = None) -> PutResult:
        """Store a few bytes of any kind (JSON, say), sealed like a row. A record that changes may be seen as it was for
        as long as its node was away or its nodes changed: put it again from time to time.

        Raises:
            ValueError: bad key, or more than ``MAX_RECORD_BYTES``.
        """
        if len(record) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(record)} bytes is longer than {MAX_RECORD_BYTES}")
        return self.put(key, Header(), record, timeout_seconds=timeout_seconds)

    def get_record(self, key: bytes, *, timeout_seconds: float | None = None) -> RecordResult:
        """Fetch what `put_record` stored."""
        buffer = bytearray(MAX_RECORD_BYTES)
        # Unlike a row, a record may change: one put back late would undo a newer one.
        result = self._get([key], [buffer], timeout_seconds, repair=False)[0]
        return RecordResult(result.reason, bytes(buffer[: result.nbytes]) if result.hit else None)

    # ---- the ring itself

    def ping(self, *, timeout_seconds: float | None = None) -> MissReason | None:
        """None when a node answers, else why the first does not."""
        answers = self._ask_all(lambda client, seconds: client.ping(timeout_seconds=seconds), timeout_seconds)
        if not answers:
            return MissReason.UNREACHABLE
        return None if None in answers.values() else next(iter(answers.values()))

    def stats(self, *, timeout_seconds: float | None = None) -> dict[str, str]:
        """Every node's INFO, as ``node/name`` to value; nothing of nodes that cannot be asked."""
        answers = self._ask_all(lambda client, seconds: client.stats(timeout_seconds=seconds), timeout_seconds)
        return {f"{node}/{name}": value for node, info in answers.items() for name, value in (info or {}).items()}

    @property
    def nodes(self) -> dict[str, bool]:
        """The members, and whether each is asked."""
        view = self._nodes.view(time.monotonic())
        return dict(zip(view.ring.nodes, view.up, strict=True))

    @property
    def is_down(self) -> bool:
        """Whether no node is being asked."""
        return not any(self.nodes.values())

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Outcomes so far: (operation, ``ok`` or a `MissReason` value) → number. Rows as the caller saw them; the rest
        as each node answered."""
        totals = {key: number for key, number in self._nodes.counts().items() if key[0] not in _COUNTED_HERE}
        with self._count_lock:
            return totals | self._counts

    def metrics(self) -> Iterable[MetricFamily]:
        """For `Registry.collect_from`."""
        view = self._nodes.view(time.monotonic())
        named = list(zip(view.ring.nodes, view.clients, strict=True))
        calls = [((node, *key), float(n)) for node, client in named for key, n in client.counts.items()]
        yield MetricFamily(m.CLIENT_CALLS, [(key, float(number)) for key, number in self.counts.items()])
        yield MetricFamily(mr.RING_NODE_CALLS, calls)
        yield MetricFamily(mr.RING_NODE_UP, [((node,), float(up)) for node, up in self.nodes.items()])
        yield MetricFamily(mr.RING_REPAIRS, [((outcome,), float(n)) for outcome, n in self._repairs.counts.items()])
        for metric, number in (
            (mr.RING_NODES, len(named)),
            (mr.RING_CHANGES, self._nodes.changes),
            (mr.RING_COPIES_LOST, self._copies_lost),
            (mr.RING_FOUND_ELSEWHERE, self._found_elsewhere),
        ):
            yield MetricFamily(metric, [((), float(number))])

    def close(self) -> None:
        """Close every connection; later calls miss."""
        self._keeper.close()
        self._repairs.close()
        self._nodes.close()
        self._calls.close()

    # ---- internals

    def _get(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer], timeout_seconds: float | None, *, repair: bool
    ) -> list[GetResult]:
        if len(buffers) != len(keys):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        deadline, view, places = self._look_for(keys, timeout_seconds)
        results = [GetResult(MissReason.UNREACHABLE) for _ in keys]
        lacking: dict[int, list[int]] = {}
        elsewhere = 0

        def get_part(client: StoreClient, part: list[int], seconds: float) -> list[GetResult]:
            wanted = [keys[index] for index in part]
            return client.get_many_into(wanted, [buffers[index] for index in part], timeout_seconds=seconds)

        wanted: Iterable[int] = range(len(keys))
        for column in range(places.shape[1]):
            parts = by_node(places[:, column : column + 1], wanted)
            answers = self._calls.ask(view, parts, get_part, self._calls.until(deadline, column, places.shape[1]))
            for (node, part), got in zip(parts.items(), answers, strict=True):
                for index, result in zip(part, got or [GetResult(MissReason.BUSY)] * len(part), strict=True):
                    results[index] = result
                    elsewhere += result.hit and column > 0
                    if result.reason in _LACKING:
                        lacking.setdefault(index, []).append(node)
            wanted = [index for index in wanted if results[index].reason in _ASK_NEXT]
            if not wanted:
                break
        if repair and elsewhere:
            self._repair(view, keys, buffers, results, lacking)
        self._count("get", [result.reason for result in results])
        with self._count_lock:
            self._found_elsewhere += elsewhere
        return results

    def _repair(
        self,
        view: RingView,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        results: list[GetResult],
        lacking: dict[int, list[int]],
    ) -> None:
        for index, nodes in lacking.items():
            header, nbytes = results[index].header, results[index].nbytes
            if header is not None:
                row = memoryview(buffers[index]).cast("B")[:nbytes]
                for node in nodes:
                    self._repairs.put(view.clients[node], keys[index], header, row)

    def _sum(
        self,
        call: Callable[..., int],
        keys: Sequence[bytes],
        copies: int,
        timeout_seconds: float | None,
    ) -> int:
        """Call with each node's keys; the sum over first or over second owners, whichever is more."""
        deadline = self._deadline(timeout_seconds)
        view = self._nodes.view(time.monotonic())
        owners = view.owners(keys, copies)

        def call_part(client: StoreClient, part: list[int], seconds: float) -> int:
            return call(client, [keys[index] for index in part], timeout_seconds=seconds)

        sums = [0]
        for column in range(owners.shape[1]):
            parts = by_node(owners[:, column : column + 1])
            answers = self._calls.ask(view, parts, call_part, deadline)
            sums.append(sum(number or 0 for number in answers))
        return max(sums)

    def _ask_all(self, call: Callable[[StoreClient, float], _T], timeout_seconds: float | None) -> dict[str, _T | None]:
        """Call every node that is asked at all (every one when none is); answers by node."""
        deadline = self._deadline(timeout_seconds)
        view = self._nodes.view(time.monotonic())
        nodes = [index for index, up in enumerate(view.up) if up] or list(range(len(view.up)))
        answers = self._calls.ask(view, {node: [] for node in nodes}, lambda c, _, seconds: call(c, seconds), deadline)
        return dict(zip([view.ring.nodes[node] for node in nodes], answers, strict=True))

    def _look_for(
        self, keys: Sequence[bytes], timeout_seconds: float | None
    ) -> tuple[float, RingView, NDArray[np.intp]]:
        """Until when to look for ``keys``, and where, one place after the other."""
        now = time.monotonic()
        view = self._nodes.view(now)
        return self._deadline(timeout_seconds), view, view.places(keys, self._copies, now)

    def _deadline(self, timeout_seconds: float | None) -> float:
        return time.monotonic() + (self._timeout_seconds if timeout_seconds is None else timeout_seconds)

    def _count(self, operation: str, reasons: Iterable[MissReason | None]) -> None:
        with self._count_lock:
            for reason in reasons:
                key = (operation, "ok" if reason is None else reason.value)
                self._counts[key] = self._counts.get(key, 0) + 1
