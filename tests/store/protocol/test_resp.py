"""Reading commands: the same whatever way the bytes are cut up, bounded, and never confused by what is in a value."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.store.client.wire import encode_command
from kvhearth.store.protocol.resp import (
    MAX_ARG_BYTES,
    MAX_ARGS,
    MAX_ARGS_BYTES,
    CommandReader,
    ConnectionGone,
    ProtocolError,
    first_bytes,
    skip_bytes,
)

nasty = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"\r\n", b"$1\r\na\r\n", b"*1\r\n", b"x" * 16_000]))
alike = st.integers(0, 30).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=8, max_size=40))
commands = st.lists(st.one_of(st.lists(nasty, min_size=1, max_size=12), alike), min_size=1, max_size=4)


class Pieces:
    """A socket whose reads return ``data`` cut after the given lengths, then as much as fits, then nothing."""

    def __init__(self, data: bytes, lengths: Sequence[int] = ()) -> None:
        self.data = data
        self.lengths = list(lengths)

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        cut = self.lengths.pop(0) if self.lengths else len(self.data)
        piece = self.data[: min(cut, len(buffer))]
        buffer[: len(piece)] = piece
        self.data = self.data[len(piece) :]
        return len(piece)

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        return self.recv_into(next(buffer for buffer in buffers if len(buffer))), [], 0, None


def reader_of(data: bytes, lengths: Sequence[int] = ()) -> CommandReader:
    return CommandReader(Pieces(data, lengths))


@settings(max_examples=60, deadline=None)
@given(commands, st.lists(st.integers(1, 50), max_size=60))
def test_commands_read_the_same_wherever_the_stream_is_cut(sent: list[list[bytes]], cuts: list[int]) -> None:
    reader = reader_of(b"".join(encode_command(*command) for command in sent), cuts)
    received = [reader.args(reader.array_length()) for _ in sent]
    assert received == sent
    assert not reader.buffered


@given(st.binary(max_size=70_000), st.lists(st.integers(1, 3000), max_size=30), st.integers(1, 5))
def test_a_value_lands_whole_in_the_memory_it_was_meant_for(value: bytes, cuts: list[int], parts: int) -> None:
    reader = reader_of(encode_command(b"SET", b"k", value) + encode_command(b"PING"), cuts)
    reader.array_length()
    reader.args(2)
    memory = bytearray(reader.bulk_length())
    step = max(1, -(-len(memory) // parts))
    reader.payload_into([memoryview(memory)[start : start + step] for start in range(0, len(memory), step)])
    assert memory == value
    assert reader.args(reader.array_length()) == [b"PING"]


@given(st.binary(max_size=5000), st.lists(st.integers(1, 300), max_size=30))
def test_a_discarded_value_leaves_the_stream_in_step(value: bytes, cuts: list[int]) -> None:
    reader = reader_of(encode_command(value) + encode_command(b"PING"), cuts)
    reader.array_length()
    reader.discard(reader.bulk_length())
    assert reader.args(reader.array_length()) == [b"PING"]


@given(st.binary(max_size=300), st.lists(st.integers(1, 20), max_size=20))
def test_any_bytes_at_all_end_in_a_command_an_error_or_the_end(data: bytes, cuts: list[int]) -> None:
    reader = reader_of(data, cuts)
    ended = False
    while not ended:
        try:
            reader.args(reader.array_length())
        except (ProtocolError, ConnectionGone):
            ended = True


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n", r"expected '\*', got 'G'"),
        (b"\xff", r"expected '\*', got '\\\\xff'"),
        (b"*x\r\n", "invalid multibulk length"),
        (b"*%d\r\n" % (MAX_ARGS + 1), "invalid multibulk length"),
        (b"*999999999999999999999\r\n", "invalid multibulk length"),
        (b"*" + b"1" * 100, "too big mbulk count string"),
        (b"*1\r\n:1\r\n", r"expected '\$', got ':'"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$%d\r\n" % (MAX_ARG_BYTES + 1), "invalid bulk length"),
        (b"*1\r\n$" + b"1" * 100, "too big bulk count string"),
        (b"*1\r\n$1\r\nabc", "expected CRLF"),
        (b"*9\r\n" + b"$1\r\na\r\n" * 8 + b"$1\r\na\rX", "expected CRLF"),
        (b"*9\r\n" + b"$1\r\na\r\n" * 8 + b"$1\r\naX\n", "expected CRLF"),
    ],
)
def test_what_is_no_command_is_refused_as_soon_as_it_shows(data: bytes, complaint: str) -> None:
    reader = reader_of(data)
    with pytest.raises(ProtocolError, match=complaint):
        reader.args(reader.array_length())


def test_the_arguments_of_one_command_are_bounded_together() -> None:
    many = MAX_ARGS_BYTES // MAX_ARG_BYTES + 1
    reader = reader_of(encode_command(*[bytes(MAX_ARG_BYTES)] * many))
    with pytest.raises(ProtocolError, match="bytes of arguments"):
        reader.args(reader.array_length())


def test_an_empty_command_is_no_command() -> None:
    reader = reader_of(b"*0\r\n*-1\r\n*1\r\n$4\r\nPING\r\n")
    assert [reader.array_length(), reader.array_length()] == [0, 0]
    assert reader.args(reader.array_length()) == [b"PING"]


@given(st.integers(0, 2**20), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_a_long_value_on_a_socket_that_wakes_seldom_comes_whole_and_alone(nbytes: int, parts: int) -> None:
    ours, theirs = connected()
    with ours, theirs:
        value = random.Random(nbytes).randbytes(nbytes)
        sender = threading.Thread(target=theirs.sendall, args=(encode_command(value) + encode_command(b"PING"),))
        sender.start()
        reader = CommandReader(ours)
        reader.set_low_water = partial(ours.setsockopt, socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        reader.array_length()
        memory = memoryview(bytearray(reader.bulk_length()))
        step = max(1, -(-len(memory) // parts))
        reader.payload_into([memory[start : start + step] for start in range(0, len(memory), step)])
        assert memory == value
        assert reader.args(reader.array_length()) == [b"PING"]
        sender.join()


def test_a_sender_that_leaves_within_a_long_value_is_noticed_on_a_socket_that_wakes_seldom() -> None:
    ours, theirs = connected()
    with ours:
        theirs.sendall(b"*1\r\n$%d\r\n" % 2**20 + bytes(100_000))
        reader = CommandReader(ours)
        reader.set_low_water = partial(ours.setsockopt, socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        reader.array_length()
        memory = memoryview(bytearray(reader.bulk_length()))
        threading.Timer(0.05, theirs.close).start()
        with pytest.raises(ConnectionGone):
            reader.payload_into([memory])


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        return server.accept()[0], theirs


@given(st.lists(st.binary(max_size=10), max_size=6), st.integers(0, 60))
def test_the_first_bytes_of_views_are_those_that_skipping_skips(parts: list[bytes], count: int) -> None:
    whole = b"".join(parts)
    assert b"".join(first_bytes([memoryview(part) for part in parts], count)) == whole[:count]


@given(st.lists(st.binary(max_size=10), max_size=6), st.integers(0, 60))
def test_skipping_bytes_of_views_is_skipping_bytes(parts: list[bytes], count: int) -> None:
    whole = b"".join(parts)
    count = min(count, len(whole))
    assert b"".join(skip_bytes([memoryview(part) for part in parts], count)) == whole[count:]
