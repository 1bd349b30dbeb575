"""Chunks of chains into the store: none without the one before it, none twice, and said so where it did not work."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhearth.connector.puts import PutItem
from kvhearth.store.client.client import StoreClient
from kvhearth.store.protocol.header import HEADER_BYTES, unpack_header
from kvhearth.store.server.server import StoreServer

from .chains import OOM, ROW, Hook, StartMover, StartScripted, chain, key, put_row, raw


def test_what_was_put_is_what_was_in_the_rows_and_is_described(
    mover: StartMover, store: StoreServer, client: StoreClient
) -> None:
    engine = mover(store.address)
    rows = [engine.fill(at, at + 1) for at in range(3)]
    engine.transfers.put(1, chain(3, group=77, epoch=2**63))

    assert engine.outcomes(1) == ["stored"] * 3
    assert engine.ended[1].nbytes == 3 * ROW
    assert not engine.ended[1].is_load
    for number, row in enumerate(rows):
        value = raw(client, store, number)
        header = unpack_header(value[:HEADER_BYTES])
        assert value[HEADER_BYTES:] == row
        assert (header.position, header.group, header.epoch) == (number, 77, 2**63)
        assert header.parent == (xxhash.xxh3_64_intdigest(key(number - 1)) if number else 0)


def test_what_the_store_has_is_not_sent_again(mover: StartMover, scripted: StartScripted) -> None:
    store = scripted()
    engine = mover(store.address)
    engine.transfers.put(1, chain(3))
    assert engine.outcomes(1) == ["stored"] * 3
    engine.transfers.put(2, chain(5))

    assert engine.outcomes(2) == ["present"] * 3 + ["stored"] * 2
    assert engine.ended[2].nbytes == 2 * ROW
    assert store.names().count(b"SET") == 5


def test_puts_go_in_the_order_of_the_chain(mover: StartMover, scripted: StartScripted) -> None:
    store = scripted()
    engine = mover(store.address, rows=200, row_bytes=64)
    engine.transfers.put(1, chain(100))
    engine.transfers.put(2, chain(100, first=100, rows=100))
    engine.outcomes(2)

    assert [args[0] for command, args in store.seen if command == b"SET"] == [key(number) for number in range(200)]


def test_no_chunk_goes_without_the_one_before_it(mover: StartMover, store: StoreServer, client: StoreClient) -> None:
    """Its parent was evicted, or never came."""
    engine = mover(store.address)
    engine.transfers.put(1, chain(3, first=4))

    assert engine.outcomes(1) == ["orphan"] * 3
    assert not any(client.exists(key(number)) for number in range(7))


def test_a_chain_goes_on_where_the_store_has_its_beginning(
    mover: StartMover, store: StoreServer, client: StoreClient
) -> None:
    put_row(client, 3, b"p" * ROW)
    engine = mover(store.address)
    engine.transfers.put(1, chain(3, first=4))

    assert engine.outcomes(1) == ["stored"] * 3


@pytest.mark.parametrize("refused", [0, 1, 2, 4])
def test_when_the_store_refuses_a_chunk_none_after_it_stays(
    mover: StartMover, scripted: StartScripted, refused: int
) -> None:
    store = scripted(lambda command, args: OOM if command == b"SET" and args[0] == key(refused) else None)
    engine = mover(store.address)
    engine.transfers.put(1, chain(5))

    assert engine.outcomes(1) == ["stored"] * refused + ["failed"] + ["orphan"] * (4 - refused)
    assert sorted(store.values) == [key(number) for number in range(refused)]
    assert engine.ended[1].nbytes == refused * ROW


def test_when_the_store_refuses_one_chain_another_is_put(mover: StartMover, scripted: StartScripted) -> None:
    store = scripted(lambda command, args: OOM if command == b"SET" and args[0] == key(0) else None)
    engine = mover(store.address)
    other = [PutItem(key(100), 10, None, 0), PutItem(key(101), 11, key(100), 1)]
    engine.transfers.put(1, chain(3) + other)

    assert engine.outcomes(1) == ["failed", "orphan", "orphan", "stored", "stored"]


def test_a_store_too_small_for_a_row_refuses_all(mover: StartMover, start_store: Callable[..., StoreServer]) -> None:
    engine = mover(start_store(max_value_bytes=1024).address)
    engine.transfers.put(1, chain(3))

    assert engine.outcomes(1) == ["failed", "orphan", "orphan"]


def test_a_twin_of_a_chunk_that_was_refused_is_not_present(mover: StartMover, scripted: StartScripted) -> None:
    """Two requests with one prefix end in one step; were the second told "present", it would not be offered again."""
    busy, go = threading.Event(), threading.Event()

    def hook(command: bytes, args: list[bytes]) -> bytes | None:
        if command == b"KV.EXISTS" and not busy.is_set():
            busy.set()
            go.wait(60)
        return OOM if command == b"SET" and args[0] == key(0) else None

    store = scripted(hook)
    engine = mover(store.address)
    engine.transfers.put(1, [PutItem(key(500), 9, None, 0)])  # keeps the thread busy until both are queued
    assert busy.wait(30)
    engine.transfers.put(2, chain(1))
    engine.transfers.put(3, chain(1, rows=5))
    go.set()

    assert engine.outcomes(2) == ["failed"]
    assert engine.outcomes(3) != ["present"]
    assert key(0) not in store.values


def test_when_the_connection_breaks_between_a_refusal_and_the_next_answer_no_orphan_stays(
    mover: StartMover, scripted: StartScripted, eventually: Callable[..., None]
) -> None:
    """The parent is refused, the child stored, and the answer to the child's put is lost."""

    def hook(command: bytes, args: list[bytes]) -> bytes | None:
        if command == b"SET" and args[0] == key(0):
            return OOM
        if command == b"SET" and args[0] == key(1):
            store.values[args[0]] = args[1]
            raise ConnectionResetError
        return None

    store = scripted(hook)
    engine = mover(store.address)
    engine.transfers.put(1, chain(2))

    assert engine.outcomes(1)[0] == "failed"
    assert engine.outcomes(1)[1] != "stored"
    assert key(1) not in store.values


def test_an_orphan_that_could_not_be_taken_back_is_when_the_store_is_back(
    mover: StartMover, scripted: StartScripted
) -> None:
    away, refuse = threading.Event(), threading.Event()
    refuse.set()

    def hook(command: bytes, args: list[bytes]) -> bytes | None:
        if command == b"DEL" and away.is_set():
            raise ConnectionResetError
        if command == b"SET" and args[0] == key(0) and refuse.is_set():
            away.set()
            return OOM
        return None

    store = scripted(hook)
    engine = mover(store.address)
    engine.transfers.put(1, chain(2))
    assert engine.outcomes(1) == ["failed", "orphan"]
    assert key(1) in store.values
    away.clear()
    engine.transfers.put(2, [PutItem(key(500), 9, None, 0)])

    assert engine.outcomes(2) == ["stored"]
    assert key(1) not in store.values


def test_a_chunk_that_was_an_orphan_once_and_is_put_properly_later_stays(
    mover: StartMover, scripted: StartScripted
) -> None:
    """Taking it back fails until its chain has been put after all; what is there then is no orphan."""
    away, refuse = threading.Event(), threading.Event()
    refuse.set()

    def hook(command: bytes, args: list[bytes]) -> bytes | None:
        if command == b"DEL" and away.is_set():
            raise ConnectionResetError
        if command == b"SET" and args[0] == key(0) and refuse.is_set():
            away.set()
            return OOM
        return None

    store = scripted(hook)
    engine = mover(store.address)
    engine.transfers.put(1, chain(2))
    assert engine.outcomes(1) == ["failed", "orphan"]
    refuse.clear()
    engine.transfers.put(2, chain(3))
    assert engine.outcomes(2) == ["failed"] * 3  # nothing goes out while the orphan cannot be taken back
    store.values[key(0)] = store.values[key(1)]  # another engine puts what was refused: the orphan is none any more
    away.clear()
    engine.transfers.put(3, chain(3))

    assert engine.outcomes(3) == ["present", "present", "stored"]
    assert {key(0), key(1), key(2)} <= set(store.values)


def test_a_store_that_stalls_while_orphans_are_taken_back_is_not_asked_for_each(
    mover: StartMover, scripted: StartScripted, gate: threading.Event
) -> None:
    """Each would cost a whole timeout, and `drain` waits for them."""

    def hook(command: bytes, args: list[bytes]) -> bytes | None:
        if command == b"DEL":
            gate.wait(60)
        return OOM if command == b"SET" and args[0] == key(0) else None

    store = scripted(hook)
    engine = mover(store.address, load_timeout_seconds=0.3, put_timeout_seconds=0.3)
    engine.transfers.put(1, chain(16))
    engine.outcomes(1)

    assert store.names().count(b"DEL") == 1


def test_pinned_chunks_stay_in_the_store(mover: StartMover, store: StoreServer, client: StoreClient) -> None:
    engine = mover(store.address)
    engine.transfers.put(1, chain(2, pin=True))
    assert engine.outcomes(1) == ["stored"] * 2
    engine.transfers.put(2, chain(2, pin=True))
    assert engine.outcomes(2) == ["present"] * 2

    assert int(client.stats()["pinned_bytes"]) > 0


def test_a_store_that_cannot_pin_says_so_and_keeps_the_chunks(
    mover: StartMover, scripted: StartScripted, caplog: pytest.LogCaptureFixture
) -> None:
    store = scripted(lambda command, args: b"-ERR unknown command 'KV.PIN'\r\n" if command == b"KV.PIN" else None)
    engine = mover(store.address)
    engine.transfers.put(1, chain(2, pin=True))

    assert engine.outcomes(1) == ["stored"] * 2
    assert "does not pin" in caplog.text


def test_the_bytes_that_wait_are_counted(
    mover: StartMover, scripted: StartScripted, gate: threading.Event, held: Hook
) -> None:
    store = scripted(held)
    engine = mover(store.address)
    assert engine.transfers.queued_put_bytes == 0
    engine.transfers.put(1, chain(5))
    assert engine.transfers.queued_put_bytes == 5 * ROW
    gate.set()
    engine.outcomes(1)

    engine.transfers.drain()
    assert engine.transfers.queued_put_bytes == 0


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 2), st.integers(0, 7), st.integers(1, 6)),
        st.tuples(st.just("evict"), st.integers(0, 2), st.integers(0, 11), st.just(0)),
        st.tuples(st.just("refuse"), st.integers(0, 2), st.integers(0, 11), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=14,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(OPERATIONS, st.booleans())
def test_whatever_is_put_refused_and_evicted_no_chunk_of_ours_is_in_the_store_without_its_parent_at_its_put(
    scripted: StartScripted, mover: StartMover, operations: list[tuple[str, int, int, int]], break_off: bool
) -> None:
    """Three chains; the model keeps for each chunk in the store whether its parent was there when it was put."""
    refused: set[bytes] = set()
    whole: dict[bytes, bool] = {}
    parents: dict[bytes, bytes | None] = {}

    def hook(command: bytes, args: list[bytes]) -> bytes | None:
        if command != b"SET":
            return None
        if args[0] in refused:
            refused.discard(args[0])
            return OOM
        parent = parents[args[0]]
        whole[args[0]] = parent is None or parent in store.values
        return None

    store = scripted(hook)
    engine = mover(store.address, rows=16, row_bytes=64)
    jobs = 0
    for what, chain_number, start, length in operations:
        name = key(1000 * chain_number + start)
        if what == "put":
            items = []
            for at in range(start, start + length):
                parent = key(1000 * chain_number + at - 1) if at else None
                items.append(PutItem(key(1000 * chain_number + at), at, parent, at))
                parents[items[-1].key] = parent
            jobs += 1
            engine.transfers.put(jobs, items)
        elif what == "evict":
            store.values.pop(name, None)
        elif what == "refuse":
            refused.add(name)
        else:
            engine.outcomes(jobs) if jobs else None
    if break_off:
        engine.transfers.drain()
    for job in range(1, jobs + 1):
        assert "" not in engine.outcomes(job)
    engine.close()
    store.close()

    assert all(whole[name] for name in store.values)
    stored = [o for job in engine.ended.values() for o in job.outcomes if o == "stored"]
    assert sum(job.nbytes for job in engine.ended.values()) == 64 * len(stored)
