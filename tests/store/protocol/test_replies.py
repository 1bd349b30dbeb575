"""Replies gathered on a connection, and when they go out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from kvhearth.store.protocol.replies import Replies

SECONDS = 10.0


@pytest.mark.parametrize(
    "reply",
    [
        lambda replies: replies.ok(),
        lambda replies: replies.simple("PONG"),
        lambda replies: replies.error("ERR no"),
        lambda replies: replies.integer(0),
        lambda replies: replies.null(),
        lambda replies: replies.bulk(b"x"),
    ],
    ids=["ok", "simple", "error", "integer", "null", "bulk"],
)
def test_replies_to_a_pipeline_without_end_go_out_by_themselves(reply: Callable[[Replies], None]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(SECONDS)
        received = threading.Event()

        def drain() -> None:
            while theirs.recv(1 << 20):
                received.set()

        reader = threading.Thread(target=drain, daemon=True)
        reader.start()
        replies = Replies(ours)
        for _ in range(200_000):
            reply(replies)
        assert received.wait(SECONDS)
        assert replies.sent_bytes > 0
        ours.shutdown(socket.SHUT_RDWR)
        reader.join(SECONDS)
