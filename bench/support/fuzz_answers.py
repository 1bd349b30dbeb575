"""What the engines of the router's fuzz answer: the good ones what can be computed from the request, the bad ones
anything, drawn by the request's own nonce. No sockets.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from typing import NamedTuple

from support.fuzzing import LINES, NONCE, Answer, damaged

_HEAD = re.compile(rb"(?:GET|POST) [^\0-\x20\x7f]+ HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\r\n\0]*\r\n)+)\r\n")


class Broken(Exception):
    """The router sent an engine what is no request."""


class Asked(NamedTuple):
    """A request as an engine sees it."""

    head: bytes
    body: bytes

    @property
    def path(self) -> bytes:
        return self.head.split(b" ", 2)[1].partition(b"?")[0]

    @property
    def nonce(self) -> str:
        found = NONCE.search(self.body)
        return found[1].decode() if found else ""


def length_of(head: bytes) -> int:
    """Bytes of the body behind a head. Raises Broken where the head is not what a proxy may send."""
    found = _HEAD.fullmatch(head)
    if found is None:
        raise Broken(f"not a head: {head[:300]!r}")
    lines = [line.partition(b": ") for line in found[1].split(b"\r\n")[:-1]]
    lengths = [value for name, _, value in lines if name.lower() == b"content-length"]
    names = {name.lower() for name, _, _ in lines}
    if names & {b"transfer-encoding", b"upgrade", b"expect", b"te"} or len(lengths) != head.startswith(b"POST"):
        raise Broken(f"framing or fields of a hop: {head[:300]!r}")
    return int(lengths[0]) if lengths else 0


def right_body(sent: bytes) -> bytes:
    """What the good engines answer to a body; the same length of text for the same body, some of them long."""
    digest = hashlib.blake2b(sent, digest_size=16).hexdigest()
    nonce = NONCE.search(sent)
    tag = nonce[0].decode() if nonce else ""
    text = json.dumps({"echo": digest, "tag": tag, "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
    return (text + " " * (int(digest[:2], 16) ** 2 if digest[2] == "0" else 0)).encode()


def right_answer(asked: Asked) -> Answer:
    """The good engines' answer, framed in one of three ways."""
    if asked.path == b"/tokenize" and not asked.nonce:
        return Answer([with_length(b'{"tokens":[1,2,3],"count":3,"max_model_len":100}')])
    body = right_body(asked.body)
    kind = body[12] % 4
    if kind < 2:
        return Answer([with_length(body)])
    if kind == 2:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        size = 16 if len(body) < 500 else 4000
        return Answer([head, *[chunk(body[at : at + size]) for at in range(0, len(body), size)], b"0\r\n\r\n"])
    return Answer([b"HTTP/1.1 200 OK\r\nX-Until: close\r\n\r\n", body], "close")


def right_page(asked: Asked, model: str) -> bytes:
    """Health, models and load, as an engine tells them."""
    if asked.path == b"/v1/models":
        return with_length(json.dumps({"object": "list", "data": [{"id": model, "object": "model"}]}).encode())
    if asked.path == b"/metrics":
        return with_length(b'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_waiting{engine="0"} 0\n')
    return with_length(b"")


def with_length(body: bytes) -> bytes:
    """A whole response with status 200."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def wrong_answer(seed: int, nonce: str) -> Answer:
    """What a bad engine answers to the request with this nonce: anything, sound now and then."""
    rng = random.Random(f"{seed}/{nonce}")
    tag = b"<<%b>>" % nonce.encode()
    end = rng.choices(("keep", "close", "reset", "hang"), (6, 5, 3, 0.2))[0]
    sound = _sound(rng, tag, end)
    kind = rng.random()
    if kind < 0.3:
        return sound
    whole = b"".join(sound.pieces)
    if kind < 0.6:
        return Answer([damaged(rng, whole, 3)], end)
    return Answer([whole[: rng.randint(0, len(whole))] if kind < 0.7 else _odd(rng, tag)], end)


def _sound(rng: random.Random, tag: bytes, end: str) -> Answer:
    body = tag + b"x" * rng.choice((0, 10, 3000)) + _usage(rng)
    status = rng.choice((200, 200, 200, 201, 400, 404, 422, 429, 500, 503, 205, 302))
    expected = None if end == "reset" else (status, body)
    kind = rng.randrange(4)
    head = b"HTTP/1.1 %d %b\r\n%b" % (status, rng.choice((b"OK", b"", b"\xe9\xff", b"a" * 99)), _lines(rng))
    if kind == 0:
        return Answer([head + b"Content-Length: %d\r\n\r\n" % len(body), body], end, expected)
    if kind == 1:
        return Answer([head + b"\r\n", body], end, expected if end == "close" else None)
    head += b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    size = rng.choice((7, 100, 5000))
    events = [chunk(body[at : at + size]) for at in range(0, len(body), size)]
    return Answer([head, *events, b"0\r\n" + rng.choice((b"", b"X-Trailer: 1\r\n")) + b"\r\n"], end, expected)


def _usage(rng: random.Random) -> bytes:
    return rng.choice(
        (
            b"",
            b'"usage":{"prompt_tokens":5,"completion_tokens":3}',
            b'"usage":{"prompt_tokens":999999999999999999999,"completion_tokens":-3}',
            b'"usage":{"prompt_tokens":"x","completion_tokens":null',
            b'"usage"' * 2000,
            b'"usage":{"completion_tokens":999999999999,"cached_tokens":999999999999}',
        )
    )


def _lines(rng: random.Random) -> bytes:
    some = (
        b"Server: x\r\nServer: y\r\n",
        b"Connection: close\r\n",
        b"Connection: keep-alive, x-hop\r\nX-Hop: 1\r\n",
        b"Set-Cookie: a=b\r\nSet-Cookie: c=d\r\n",
        b"X-Kvhearth-Engine: forged\r\n",
        b"X-Kvhearth-Hit: tokens=1\r\n",
        b"Content-Type: text/event-stream; charset=utf-8\r\n",
        b"Retry-After: 1\r\n",
        b"Upgrade: h2c\r\n",
        b"X-Long: " + b"l" * 4000 + b"\r\n",
    )
    return b"".join(line for line in some if rng.random() < 0.1)


def _odd(rng: random.Random, tag: bytes) -> bytes:
    any_of, ok = rng.choice, b"HTTP/1.1 200 OK\r\n"
    fit = b"Content-Length: %d\r\n\r\n%b" % (len(tag), tag)
    coded = b"Transfer-Encoding: chunked\r\n\r\n"
    made = (
        b"HTTP/1.1 100 Continue\r\n\r\n" * any_of((1, 3, 500)) + ok + fit,
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\nX-Leak: " + tag + b"\r\n\r\n" + ok + fit,
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + tag,
        b"HTTP/1.1 204 No Content\r\n" + fit,
        b"HTTP/1.1 204 No Content\r\n" + coded + chunk(tag) + b"0\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\n" + fit,
        b"HTTP/1.1 %b Odd\r\n" % any_of((b"000", b"99", b"600", b"999", b"1000", b"2x0", b"-20", b"")) + fit,
        any_of((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1.1", b"ICY", b"http/1.1")) + b" 200 OK\r\n" + fit,
        b"HTTP/1.1 200 O\0\x1b[31m\x7fK\r\n" + fit,
        ok + b"Content-Length: 5\r\n" + coded + chunk(tag) + b"0\r\n\r\n",
        ok + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + tag,
        ok + b"Content-Length: %b\r\n\r\n" % any_of((b"-1", b"x", b"9" * 25, b"", b"1, 1", b"99999999999")) + tag,
        ok + b"Transfer-Encoding: %b\r\n\r\n" % any_of((b"gzip", b"gzip, chunked", b"identity", b"chunked,x")) + tag,
        ok + coded + any_of((b"-1\r\n", b"zz\r\n", b"fffffffffffffffff\r\n", b"5\r\nxx\r\n")) + tag,
        ok + coded + b"1\r\nx\r\n" * any_of((3, 3000)) + b"0\r\n\r\n",
        ok + coded + b"1;" + b"e" * any_of((10, 70_000)) + b"\r\nx\r\n0\r\n\r\n",
        ok + b"X: " + b"h" * any_of((60_000, 80_000, 500_000)) + b"\r\n" + fit,
        ok + b"X: 1\r\n" * 20_000 + fit,
        ok + any_of(LINES) + fit,
        (ok + fit).replace(b"\r\n", b"\n"),
        ok + fit + ok + fit,
        ok + fit + ok + b"X-Evil: " + tag,
        ok + fit + ok + b"Content-Length: 900\r\n\r\n" + tag,
        ok + fit + rng.randbytes(20),
        rng.randbytes(rng.randrange(200)),
        b"",
    )
    return any_of(made)
