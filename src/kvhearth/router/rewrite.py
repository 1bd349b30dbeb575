"""Changes single fields of a JSON request body and leaves every other value byte for byte as it came."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from kvhearth.router.body import read_top

CLIENT_MAY_NOT_SET = (
    "cache_salt",
    "ec_transfer_params",
    "kv_transfer_params",
    "priority",
    "request_id",
    "vllm_xargs",
)
"""Fields of vLLM's requests with which a tenant could reach what is not its own: another one's KV (``cache_salt``, the
transfer parameters, and ``vllm_xargs``, which vLLM hands on as any of them), its place in an engine's queue
(``priority``) or its answer (``request_id``). The router sets what is needed itself."""


def rewrite(body: bytes, *, drop: Collection[str], put: Mapping[str, Any]) -> bytes:
    """The body without the fields in ``drop`` and with those of ``put``, whatever it said of these.

    A name may be written with escapes, so only a body without any backslash is searched for the names as they are.
    Of a field that comes twice the last one counts and only it stays.

    Raises:
        BadBody: it is not a JSON object.
    """
    if not put and b"\\" not in body and not any(b'"%b"' % name.encode() in body for name in drop):
        return body
    top = read_top(body)
    if not put and top.keys().isdisjoint(drop):
        return body
    for name in drop:
        top.pop(name, None)
    for name, value in put.items():
        top[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(top)
