"""Which header lines pass."""

from __future__ import annotations

from kvhearth.router.headers import HeaderLines


def lines(*pairs: tuple[bytes, bytes]) -> HeaderLines:
    headers = HeaderLines()
    for name, value in pairs:
        headers.add(name, value)
    return headers


def test_what_is_forwarded_keeps_its_order_and_spelling():
    headers = lines((b"X-B", b"1"), (b"x-a", b"2"), (b"X-B", b"3"))
    assert headers.forwarded() == b"X-B: 1\r\nx-a: 2\r\nX-B: 3\r\n"


def test_hop_by_hop_lines_stay_behind_in_any_spelling():
    for name in (
        b"Connection",
        b"KEEP-ALIVE",
        b"Te",
        b"Trailer",
        b"Transfer-Encoding",
        b"Upgrade",
        b"Proxy-Connection",
    ):
        assert lines((name, b"x"), (b"A", b"b")).forwarded() == b"A: b\r\n"


def test_lines_that_connection_names_stay_behind():
    headers = lines(
        (b"X-Mine", b"1"), (b"Connection", b"close, x-mine"), (b"Connection", b"X-OTHER"), (b"x-other", b"2")
    )
    assert headers.forwarded() == b""
    assert headers.taken[b"connection"] == b"close, x-mine, X-OTHER"


def test_a_client_cannot_claim_to_be_an_engine():
    assert lines((b"X-KVHearth-Engine", b"e9")).forwarded() == b""


def test_the_first_line_of_a_name():
    headers = lines((b"Content-Type", b"a/b"), (b"content-type", b"c/d"))
    assert headers.first(b"content-type") == b"a/b"
    assert headers.first(b"accept") is None
