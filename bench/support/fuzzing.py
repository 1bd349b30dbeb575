"""What clients send in the fuzz of the router, drawn from a `random.Random`: requests whole, odd and damaged, bodies
with every wrong type somewhere. No sockets.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from typing import Any, NamedTuple

NONCE = re.compile(rb"<<([0-9a-f]{16})>>")
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/audio/transcriptions",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/score",
    "/pooling",
)
_FIELDS = (
    "model messages prompt input stream stream_options user prompt_cache_key cache_salt kv_transfer_params tools "
    "system instructions query documents text_1 text_2 tokens add_special_tokens add_generation_prompt thinking "
    "continue_final_message chat_template chat_template_kwargs reasoning reasoning_effort output_config "
    "truncate_prompt_tokens previous_response_id max_tokens"
)
FIELDS = _FIELDS.split()
_INNER = (
    "role content type text refusal thinking image_url tool_calls tool_call_id function name arguments id input "
    "input_schema reasoning tools status effort enable_thinking"
)
INNER = _INNER.split()
WORDS = ("", "user", "system", "assistant", "tool", "developer", "text", "image", "input_text", "tool_use", "function")
TOKENS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n\r\n",
    b"\0",
    b" ",
    b":",
    b"\r\n ",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"-1\r\n",
    b";x=y",
    b"Content-Length: 3\r\n",
    b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive, content-type\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
    b"Expect: 100-continue\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b"\xff\xfe",
    b"[" * 40,
    b'{"model":',
    b"\\ud800",
    b"1e999",
    b"9" * 60,
)


class Sent(NamedTuple):
    """A whole request on the wire, and its body as the engine is to get it; "" is the nonce of one for the router."""

    data: bytes
    nonce: str = ""
    body: bytes = b""
    is_head: bool = False


class Answer(NamedTuple):
    """What an engine does for a request: pieces to be written, then ``end``: keep, close, reset or hang. ``expected``:
    status and body, where the client must get this very answer."""

    pieces: list[bytes]
    end: str = "keep"
    expected: tuple[int, bytes] | None = None


# Bodies


def plain_body(rng: random.Random, nonce: str, model: str) -> bytes:
    """A body that is right for some path, with the nonce in it."""
    text = f"<<{nonce}>> " + "word " * int(rng.expovariate(1 / 60))
    fields: dict[str, Any] = {"model": model, rng.choice(("prompt", "input", "query")): text}
    if rng.random() < 0.5:
        roles = ["system", "user", "assistant", "user"][: rng.randint(1, 4)]
        fields = {"model": model, "messages": [{"role": role, "content": text} for role in roles]}
    if rng.random() < 0.3:
        fields["stream"] = True
    if rng.random() < 0.2:
        fields["prompt"] = [rng.randrange(50_000) for _ in range(rng.randrange(80))]
        fields["x"] = text
    return json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode()


def odd_body(rng: random.Random, nonce: str, model: str) -> bytes:
    """A body that has something wrong with it, often in what the router reads."""
    kind = rng.random()
    if kind < 0.7:
        fields = {"model": model, "x": f"<<{nonce}>>"}
        for name in rng.sample(FIELDS, rng.randint(1, 4)):
            fields[name] = odd_value(rng)
        if rng.random() < 0.8:
            fields["model"] = model
        return json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if kind < 0.8:
        text = json.dumps({"model": model, "prompt": f"<<{nonce}>>", "user": "u"}).encode()
        wild = (b"\\ud800", b"\xff", b"1e999", b"-0", b"9" * rng.choice((30, 5000)), b"NaN", b"\0", b"[" * 3000, b"]")
        at = rng.randrange(len(text))
        return text[:at] + rng.choice(wild) + text[at:]
    if kind < 0.9:
        depth = rng.choice((100, 900, 1100, 5000))
        opened, closed = rng.choice(((b"[", b"]"), (b'{"content":[', b"]}"), (b'{"a":', b"}")))
        inner = opened * depth + b"1" + closed * depth
        field = rng.choice((b"messages", b"tools", b"x", b"input")) + b'":'
        return b'{"model":"' + model.encode() + b'","y":"<<' + nonce.encode() + b'>>","' + field + inner + b"}"
    return rng.choice((b"", b"null", b"[]", b'"model"', b"{}", b"{", rng.randbytes(rng.randrange(300))))


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value; objects have names that requests use."""
    kind = rng.randrange(12 if depth < 4 else 8)
    if kind < 8:
        return rng.choice(
            (
                None,
                True,
                False,
                0,
                -1,
                1,
                2**31,
                2**32,
                2**63,
                -(2**63) - 1,
                10**40,
                1.5,
                -0.0,
                1e308,
                "",
                "\0",
                "\u2028é漢🦊",
                "x" * rng.randrange(400),
                "base64," + "A" * 100,
                *WORDS,
            )
        )
    if kind < 10:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    names = rng.sample(INNER, rng.randint(0, 4))
    made = {name: odd_value(rng, depth + 1) for name in names}
    if rng.random() < 0.5:
        made["role"] = rng.choice(WORDS)
    if rng.random() < 0.3:
        made["type"] = rng.choice(WORDS)
    return made


def form(rng: random.Random, nonce: str, model: str) -> tuple[str, bytes]:
    """Content type and body of a form with a file."""
    boundary = rng.choice(("b", "----x" * 8, "a b'"))
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="'
    text = f'{part}model"\r\n\r\n{model}\r\n{part}file"; filename="f"\r\n\r\n<<{nonce}>>\r\n--{boundary}--\r\n'
    return f'multipart/form-data; boundary="{boundary}"', text.encode()


# Requests


def request(rng: random.Random, nonce: str, model: str, *, odd: bool = False) -> Sent:
    """A whole request to be forwarded, in one of the ways that HTTP/1.1 has to say it."""
    path, kind = rng.choice(PATHS), "application/json"
    body = (odd_body if odd else plain_body)(rng, nonce, model)
    if rng.random() < 0.1:
        kind, body = form(rng, nonce, model)
    if rng.random() < 0.2:
        path += rng.choice(("?a=1", "?x=%20%00&y", "?" + "q" * rng.randrange(2000), "?"))
    if rng.random() < 0.1:
        path = "http://example.org:1234" + path
    lines = [f"Host: {rng.choice(('r', '[::1]:80', ''))}", f"{rng.choice(('Content-Type', 'content-type'))}: {kind}"]
    lines += [line for line in HARMLESS if rng.random() < 0.08]
    rng.shuffle(lines)
    framing, payload = f"Content-Length: {len(body)}", body
    if rng.random() < 0.3:
        framing, payload = rng.choice(("Transfer-Encoding: chunked", "transfer-encoding:CHUNKED")), chunked(rng, body)
    lines.insert(rng.randint(0, len(lines)), framing)
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n"
    return Sent(head.encode("latin-1") + payload, nonce, body)


HARMLESS = (
    "X-Request-Id: <script>\xe9",
    "X-Session-Id: s",
    "Connection: keep-alive",
    "Connection: X-Hop\r\nX-Hop: 1",
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    "Expect: 100-continue",
    "TE: trailers",
    "X-Data-Parallel-Rank: 7",
    "X-Kvhearth-Engine: mine",
    "Authorization: Bearer x\r\nAuthorization: Bearer y",
    "X-Empty:",
    "X-Long: " + "v" * 5000,
    "Accept-Encoding: gzip\r\nX-Tabs:\t a\tb \t",
)


def chunked(rng: random.Random, body: bytes) -> bytes:
    """The body in chunks of any size, with extensions and trailers now and then."""
    out, at = b"", 0
    while at < len(body):
        size = min(len(body) - at, rng.choice((1, 2, 7, 100, 4096)))
        digits = rng.choice(("%x", "%X", "000%x")) % size
        out += digits.encode() + rng.choice((b"", b"", b";a=b", b';q="x y"')) + b"\r\n" + body[at : at + size] + b"\r\n"
        at += size
    return out + b"0\r\n" + rng.choice((b"", b"", b"X-Trailer: 1\r\n")) + b"\r\n"


def page(rng: random.Random) -> Sent:
    """A page of the router's own."""
    method = rng.choice(("GET", "GET", "HEAD"))
    target = rng.choice(
        (
            "/health",
            "/v1/models",
            "/v1/models/good",
            "/v1/models/%FF%00",
            "/nothing",
            "/debug/decision?last=3",
            "/debug/decision?id=%ff&id=1",
            "/debug/decision?last=9999999",
            "/metrics",
            "/v1/completions",
            "/" + "a" * rng.randrange(3000),
        )
    )
    data = f"{method} {target} HTTP/1.1\r\nHost: r\r\n\r\n"
    return Sent(data.encode(), is_head=method == "HEAD")


def odd_request(rng: random.Random, nonce: str, model: str) -> bytes:
    """Bytes that are nearly a request, or one that few clients send."""
    body = plain_body(rng, nonce, model)
    path, length, any_of = rng.choice(PATHS), len(body), rng.choice
    post = f"POST {path} HTTP/1.1\r\nHost: r\r\n".encode()
    fit = b"Content-Length: %d\r\n" % length
    whole = fit + b"\r\n" + body
    coded = post + b"Transfer-Encoding: chunked\r\n\r\n"
    made = (
        post + b"Transfer-Encoding: chunked\r\n" + whole,
        post + b"Content-Length: 0\r\n" + whole,
        post + fit + whole,
        post + b"Content-Length: %b\r\n\r\n" % any_of(LENGTHS) + body,
        post + b"Content-Length: %d\r\n\r\n" % (length + any_of((-20, -1, 1, 100))) + body,
        post + b"Transfer-Encoding: %b\r\n\r\n" % any_of(CODINGS) + body,
        coded + b"%b\r\n" % any_of((b"-1", b"fffffffff", b"zz", b" 5", b"")) + body,
        coded + b"%x\r\n" % (length + 1) + body + b"\r\n0\r\n\r\n",
        post + b"Expect: %b\r\n" % any_of((b"100-continue", b"200-ok", b"")) + whole,
        post + b"X: %b\r\n" % (b"h" * any_of((60_000, 70_000, 300_000))) + whole,
        post + b"X: 1\r\n" * any_of((500, 20_000)) + whole,
        post + any_of(LINES) + whole,
        (post + fit + b"\r\n").replace(b"\r\n", b"\n") + body,
        post.replace(b"1.1", any_of((b"1.0", b"0.9", b"2.0", b"1.2", b"9"))) + whole,
        post.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\nUpgrade: x\r\n" + whole,
        post + b"Upgrade: websocket\r\nConnection: close, Upgrade\r\n" + whole,
        post.replace(b"POST", any_of(METHODS)) + whole,
        post.replace(path.encode(), any_of(TARGETS)) + whole,
        post + b"Content-Encoding: gzip\r\n" + whole,
        b"\r\n\r\n\n" + post + whole,
        b"GET /health HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(80),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(30),
        rng.randbytes(rng.randrange(1, 400)),
    )
    return any_of(made)


LENGTHS = (b"-1", b"+5", b"0x10", b"1e3", b"9" * 30, b"", b" 5 5")
CODINGS = (b"gzip, chunked", b"chunked, gzip", b"x", b"chunkedx", b"chunked\r\nTransfer-Encoding: chunked")
METHODS = (b"CONNECT", b"PUT", b"DELETE", b"PATCH", b"post", b"FOO", b"HEAD", b"OPTIONS")
TARGETS = (b"*", b"", b"//", b"/v1/../x", b"/v1/%2e%2e/x", b"/\xff", b"http://", b"http://a?b", b"a b", b"a://b/c")
LINES = (
    b" folded: 1\r\n",
    b"X: 1\r\n folded\r\n",
    b"X\0: 1\r\n",
    b"X: \0\r\n",
    b"X : 1\r\n",
    b": 1\r\n",
    b"X\r\n",
    b"X: a\rb\r\n",
    b"X: a\nY: b\r\n",
    b"X: \x7f\x01\r\n",
)
"""Header lines with something wrong about them."""


def damaged(rng: random.Random, data: bytes, times: int = 4) -> bytes:
    """Up to ``times`` of: a byte changed, some cut out or doubled, noise or a token put in, the end cut off."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, times)):
        at, kind, count = rng.randint(0, len(changed)), rng.randrange(7), rng.randint(1, 30)
        if kind == 0 and at < len(changed):
            changed[at] = rng.getrandbits(8)
        elif kind == 1:
            del changed[at : at + count]
        elif kind == 2:
            changed[at:at] = changed[at : at + count]
        elif kind == 3:
            changed[at:at] = rng.randbytes(count)
        elif kind < 6:
            changed[at:at] = rng.choice(TOKENS)
        else:
            del changed[at:]
    return bytes(changed)


def cut_up(rng: random.Random, data: bytes) -> list[bytes]:
    """The data in pieces as a network may bring it: mostly one, now and then very many."""
    kind = rng.random()
    if kind < 0.6 or len(data) < 2:
        return [data]
    if kind < 0.7 and len(data) < 600:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(rng.sample(range(1, len(data)), min(len(data) - 1, rng.randint(1, 6))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def nonce_of(seed: int, number: int, at: int = 0) -> str:
    """Of the ``at``-th request of a case; no two are alike."""
    return hashlib.blake2b(f"{seed}/{number}/{at}".encode(), digest_size=8).hexdigest()
