"""Chunks from the store into rows: the right bytes in the right rows, or a failure and the right bytes elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvhearth.connector import transfers as module
from kvhearth.store.client.client import StoreClient
from kvhearth.store.protocol.header import HEADER_BYTES, Header
from kvhearth.store.server.server import StoreServer

from .chains import ROW, Hook, StartMover, StartScripted, chain, key, overwrite, put_row, raw

# ---- loads


def test_each_chunk_lands_in_its_row_and_nowhere_else(
    mover: StartMover, store: StoreServer, client: StoreClient
) -> None:
    rows = [bytes([number + 1]) * ROW for number in range(5)]
    for number, row in enumerate(rows):
        put_row(client, number, row)
    engine = mover(store.address, rows=12)
    engine.transfers.load(1, [key(number) for number in range(5)], [9, 0, 4, 11, 2])

    assert engine.outcomes(1) == ["ok"] * 5
    assert [engine.row(at) for at in (9, 0, 4, 11, 2)] == rows
    assert all(engine.row(at) == bytes(ROW) for at in (1, 3, 5, 6, 7, 8, 10))
    assert engine.ended[1].is_load
    assert engine.ended[1].nbytes == 5 * ROW
    assert engine.progress.is_set()


def test_a_long_job_on_several_connections_ends_once_with_all_its_chunks(
    mover: StartMover, store: StoreServer, client: StoreClient
) -> None:
    count = 3 * module._BATCH_CHUNKS + 7
    for number in range(count):
        put_row(client, number, number.to_bytes(2, "big") * 32)
    engine = mover(store.address, rows=count, row_bytes=64, connections=4)
    engine.transfers.load(1, [key(number) for number in range(count)], list(reversed(range(count))))

    assert engine.outcomes(1) == ["ok"] * count
    for number in range(count):
        assert engine.row(count - 1 - number) == number.to_bytes(2, "big") * 32


@pytest.mark.parametrize(("length", "outcome"), [(ROW - 1, "length"), (0, "length"), (ROW + 1, "too_large")])
def test_a_value_of_another_length_is_not_ours(
    mover: StartMover, store: StoreServer, client: StoreClient, length: int, outcome: str
) -> None:
    put_row(client, 0, b"a" * ROW)
    put_row(client, 1, b"b" * length)
    put_row(client, 2, b"c" * ROW)
    engine = mover(store.address)
    engine.transfers.load(1, [key(0), key(1), key(2)], [0, 1, 2])

    assert engine.outcomes(1) == ["ok", outcome, "ok"]
    assert engine.row(0) == b"a" * ROW
    assert engine.row(2) == b"c" * ROW


@pytest.mark.parametrize("at", [0, 5, 9, 20, 47, 48, HEADER_BYTES, HEADER_BYTES + ROW // 2, HEADER_BYTES + ROW - 1])
def test_a_flipped_bit_anywhere_fails_the_chunk_and_only_it(
    mover: StartMover, store: StoreServer, client: StoreClient, at: int
) -> None:
    for number in range(3):
        put_row(client, number, bytes([number + 1]) * ROW)
    value = bytearray(raw(client, store, 1))
    value[at] ^= 4
    overwrite(store, 1, bytes(value))
    engine = mover(store.address)
    engine.transfers.load(1, [key(0), key(1), key(2)], [0, 1, 2])
    outcomes = engine.outcomes(1)

    assert outcomes[0] == outcomes[2] == "ok"
    assert outcomes[1] in ("checksum", "header")


@pytest.mark.parametrize("value", [b"", b"x", b"\0" * 63, b"\0" * 64, b"\0" * (64 + ROW), b"KVHV" + b"\1" * (60 + ROW)])
def test_what_is_no_chunk_at_all_fails(
    mover: StartMover, store: StoreServer, client: StoreClient, value: bytes
) -> None:
    overwrite(store, 0, value)
    put_row(client, 1, b"b" * ROW)
    engine = mover(store.address)
    engine.transfers.load(1, [key(0), key(1)], [0, 1])
    outcomes = engine.outcomes(1)

    assert outcomes[0] in ("checksum", "header")
    assert outcomes[1] == "ok"


def test_another_chunks_bytes_under_a_key_fail(mover: StartMover, store: StoreServer, client: StoreClient) -> None:
    put_row(client, 0, b"a" * ROW)
    put_row(client, 1, b"b" * ROW)
    overwrite(store, 0, raw(client, store, 1))
    engine = mover(store.address)
    engine.transfers.load(1, [key(0), key(1)], [0, 1])

    assert engine.outcomes(1) == ["checksum", "ok"]


def test_a_chunk_evicted_since_it_was_looked_up_fails_and_the_others_come(
    mover: StartMover, store: StoreServer, client: StoreClient
) -> None:
    put_row(client, 0, b"a" * ROW)
    engine = mover(store.address)
    engine.transfers.load(1, [key(0), key(1)], [0, 1])

    assert engine.outcomes(1) == ["ok", "absent"]
    assert engine.ended[1].nbytes == ROW


def test_a_load_of_nothing_ends_at_once(mover: StartMover, store: StoreServer) -> None:
    engine = mover(store.address)
    engine.transfers.load(1, [], [])
    engine.transfers.put(2, [])

    assert engine.outcomes(1) == []
    assert engine.outcomes(2) == []


def test_after_a_timeout_no_late_byte_reaches_a_row(
    mover: StartMover, scripted: StartScripted, gate: threading.Event
) -> None:
    """The store sends half of a value, is silent past the deadline, and then sends the rest after all."""
    row = b"r" * ROW
    sealed = Header().sealed(key(0), row)
    reply = b"$%d\r\n" % (HEADER_BYTES + ROW) + sealed.pack() + row + b"\r\n"
    sent_rest = threading.Event()

    def hook(command: bytes, args: list[bytes]) -> bytes | None:
        sock = store._open[-1]
        sock.sendall(reply[: HEADER_BYTES + ROW // 2])
        gate.wait(60)
        try:
            sock.sendall(reply[HEADER_BYTES + ROW // 2 :] * 20)
        finally:
            sent_rest.set()
        return b""

    store = scripted(hook)
    engine = mover(store.address, rows=4, connections=1, load_timeout_seconds=0.2)
    engine.transfers.load(1, [key(0), key(1)], [0, 1])
    assert engine.outcomes(1)[0] in ("timeout", "unreachable")
    engine.transfers.drain()
    for at in range(4):
        engine.fill(at, 0xEE)
    gate.set()
    assert sent_rest.wait(30)

    assert bytes(engine.memory) == b"\xee" * (4 * ROW)


def test_when_the_store_does_not_answer_the_rest_of_the_job_is_given_up(
    mover: StartMover, scripted: StartScripted, silent: Hook
) -> None:
    store = scripted(silent)
    count = 4 * module._BATCH_CHUNKS
    engine = mover(store.address, rows=count, row_bytes=64, connections=1, load_timeout_seconds=0.2)
    engine.transfers.load(1, [key(number) for number in range(count)], list(range(count)))
    outcomes = engine.outcomes(1)

    assert outcomes[: module._BATCH_CHUNKS] == ["timeout"] * module._BATCH_CHUNKS
    assert outcomes[module._BATCH_CHUNKS :] == ["skipped"] * 3 * module._BATCH_CHUNKS


# ---- both


def test_loads_go_before_puts(
    mover: StartMover, scripted: StartScripted, gate: threading.Event, held: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for a load and nobody for a put: what is queued of loads goes first."""
    monkeypatch.setattr(module, "_YIELD_SECONDS", 60.0)
    store = scripted(held)
    count = 4 * module._BATCH_CHUNKS
    engine = mover(store.address, rows=count, row_bytes=64, connections=1)
    engine.transfers.load(1, [key(number) for number in range(count)], list(range(count)))
    engine.transfers.put(2, chain(2))
    gate.set()
    assert engine.outcomes(2) == ["stored"] * 2

    names = store.names()
    assert names.index(b"KV.EXISTS") >= count
    assert engine.outcomes(1) == ["absent"] * count


def test_loads_that_never_end_do_not_hold_puts_back_for_ever(
    mover: StartMover, scripted: StartScripted, gate: threading.Event
) -> None:
    store = scripted(lambda command, args: b"" if command == b"GET" and gate.wait(60) else None)
    engine = mover(store.address, connections=1)
    engine.transfers.load(1, [key(9)], [9])
    engine.transfers.put(2, chain(2))

    assert engine.outcomes(2) == ["stored"] * 2
    assert 1 not in engine.ended


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_every_job_ends_once_when_the_store_is_killed(
    mover: StartMover, start_store: Callable[..., StoreServer], when: str
) -> None:
    store = start_store()
    engine = mover(store.address, rows=256, row_bytes=256, load_timeout_seconds=1.0, put_timeout_seconds=1.0)
    if when == "before":
        store.stop()
    for job in range(0, 40, 2):
        engine.transfers.put(job, chain(100, rows=0))
        engine.transfers.load(job + 1, [key(number) for number in range(100)], list(range(100, 200)))
        if when == "during" and job == 10:
            store.stop()
    if when == "after":
        engine.outcomes(38)
        engine.outcomes(39)
        store.stop()
    for job in range(40):
        assert len(engine.outcomes(job, 60)) == 100
    engine.transfers.drain()
    engine.take()

    assert sorted(engine.ended) == list(range(40))
    known = {
        "ok",
        "absent",
        "timeout",
        "unreachable",
        "breaker_open",
        "skipped",
        "refused",
        "protocol",
        "busy",
        "error",
    }
    for job in engine.ended.values():
        assert set(job.outcomes) <= (known if job.is_load else {"stored", "present", "failed", "orphan"})
        assert job.nbytes == 256 * job.outcomes.count("ok" if job.is_load else "stored")


def test_a_store_that_comes_back_is_used_again(mover: StartMover, scripted: StartScripted) -> None:
    down = threading.Event()
    down.set()

    def hook(command: bytes, args: list[bytes]) -> bytes | None:
        if down.is_set():
            raise ConnectionResetError
        return None

    store = scripted(hook)
    engine = mover(store.address)
    for job in range(3):
        engine.transfers.put(job, chain(2))
        assert "stored" not in engine.outcomes(job)
    down.clear()
    for job in range(3, 3000):
        engine.transfers.put(job, chain(2))
        if engine.outcomes(job) == ["stored"] * 2:
            break
    engine.transfers.load(9999, [key(0), key(1)], [4, 5])

    assert engine.outcomes(9999) == ["ok", "ok"]


def test_drain_gives_up_what_waits_and_returns_once_nothing_moves(
    mover: StartMover, scripted: StartScripted, silent: Hook
) -> None:
    store = scripted(silent)
    engine = mover(store.address, rows=300, row_bytes=64, load_timeout_seconds=0.3, put_timeout_seconds=0.3)
    for job in range(6):
        engine.transfers.load(job, [key(number) for number in range(100)], list(range(100)))
    engine.transfers.put(6, chain(150, rows=100))
    drain = threading.Thread(target=engine.transfers.drain)
    drain.start()
    drain.join(30)
    assert not drain.is_alive()
    engine.take()

    assert sorted(engine.ended) == list(range(7))
    for job in range(6):
        assert set(engine.ended[job].outcomes) <= {"timeout", "cancelled", "skipped", "unreachable", "breaker_open"}
    assert "stored" not in engine.ended[6].outcomes
    assert engine.transfers.queued_put_bytes == 0


def test_after_drain_the_engine_goes_on(mover: StartMover, store: StoreServer) -> None:
    engine = mover(store.address)
    engine.transfers.drain()
    engine.fill(0, 5)
    engine.transfers.put(1, chain(1))
    assert engine.outcomes(1) == ["stored"]
    engine.transfers.load(2, [key(0)], [3])

    assert engine.outcomes(2) == ["ok"]
    assert engine.row(3) == b"\5" * ROW


def test_close_returns_though_the_store_is_silent_and_lets_go_of_the_rows(
    mover: StartMover, scripted: StartScripted, silent: Hook
) -> None:
    store = scripted(silent)
    engine = mover(store.address, load_timeout_seconds=0.3, put_timeout_seconds=0.3)
    engine.transfers.load(1, [key(0)], [0])
    engine.transfers.put(2, chain(3, rows=1))
    closer = threading.Thread(target=engine.transfers.close)
    closer.start()
    closer.join(30)
    assert not closer.is_alive()
    engine.take()

    assert sorted(engine.ended) == [1, 2]
    assert not any(thread.is_alive() for thread in engine.transfers._threads)
    engine.memory.clear()  # would be refused while a view of it is left, as the region's unmapping is


def test_close_may_be_called_twice(mover: StartMover, store: StoreServer) -> None:
    engine = mover(store.address)
    engine.transfers.close()
    engine.transfers.close()
