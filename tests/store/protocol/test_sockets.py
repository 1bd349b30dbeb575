"""What a socket that carries values may have under way: little within a machine, what the kernel likes beyond it."""

from __future__ import annotations

import socket

import pytest

from kvhearth.store.protocol.sockets import keep_in_cache


def send_buffer_bytes(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@pytest.mark.parametrize(("source", "changed"), [("127.0.0.1", True), ("127.0.0.2", False)], ids=["same", "other"])
def test_only_a_peer_at_our_own_address_gets_a_small_buffer(source: str, changed: bool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=(source, 0)) as sock,
    ):
        before = send_buffer_bytes(sock)
        keep_in_cache(sock)
        after = send_buffer_bytes(sock)
    assert after == (2 * 128 * 1024 if changed else before)  # the kernel doubles what it is told, socket(7)


def test_unix_sockets_are_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = send_buffer_bytes(ours)
        keep_in_cache(ours)
        assert send_buffer_bytes(ours) == before


def test_a_peer_that_left_already_is_no_error() -> None:
    with socket.socket() as never_connected:
        keep_in_cache(never_connected)
