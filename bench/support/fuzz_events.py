"""What engines and the store may tell of KV, sound and broken, for the router's fuzz. No sockets."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec

from kvhearth.store.protocol.packed import pack_keys
from support.fuzzing import damaged

_BLOCK = 4
_HASHES = 400
_FURTHER = ("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "locality")
_ODD = (None, True, 0, -1, 1, 2**32, 2**63, 2**64 - 1, 1.5, "", "GPU", "salt", "REMOTE", b"", b"\xff" * 32)
_STORE_KINDS = (b"hello", b"snapshot", b"live", b"put", b"put", b"evict", b"clear", b"gap", b"ping", b"other", b"\xff")


def event_batch(rng: random.Random) -> bytes:
    """A batch of KV events as vLLM packs it, or what was one."""
    events = [_event(rng) for _ in range(rng.choice((0, 1, 1, 2, 8)))]
    stamp = time.time() if rng.random() < 0.9 else rng.choice((0, -1.0, 1e308, float("nan"), float("inf"), "now", None))
    payload = msgspec.msgpack.encode([stamp, events, *([0] if rng.random() < 0.9 else [])])
    if rng.random() < 0.2:
        payload = damaged(rng, payload)
    if rng.random() < 0.01:
        payload = b"\x92\x01\x91\x83\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xaaextra_keys" + b"\x91" * 3000
    return payload


def _event(rng: random.Random) -> dict[str, Any]:
    kind = rng.choices(("BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockMoved"), (60, 30, 1, 2))[0]
    first, count = rng.randrange(_HASHES), rng.randrange(5)
    hashes: list[Any] = [_named(first + at) for at in range(count)]
    medium = rng.choice(("GPU", "GPU", "CPU", "STORAGE"))
    event: dict[str, Any] = {"type": kind, "block_hashes": hashes, "medium": medium}
    if kind == "BlockStored":
        event["parent_block_hash"] = _named(first - 1) if first else None
        event["token_ids"] = [token for at in range(count) for token in range(first + at, first + at + _BLOCK)]
        event["block_size"] = _BLOCK
        event["lora_id"] = None
    if rng.random() < 0.3:
        event[rng.choice((*event, *_FURTHER))] = _odd(rng)
    return event


def _named(number: int) -> int:
    return (number + 1) * 0x9E3779B97F4A7C15 % 2**64


def _odd(rng: random.Random, depth: int = 0) -> Any:
    if depth < 3 and rng.random() < 0.4:
        inner = [_odd(rng, depth + 1) for _ in range(rng.randrange(4))]
        return inner if rng.random() < 0.6 else dict(zip(("a", 1, b"x", None), inner, strict=False))
    more = ("full_attention", "sliding_window", rng.randbytes(8), rng.getrandbits(64), -rng.getrandbits(63))
    return rng.choice((*_ODD, *more))


def store_message(rng: random.Random) -> list[bytes | int]:
    """An event of the store's feed as it has been read from the wire, or an array of another kind."""
    kind = rng.choice(_STORE_KINDS)
    numbers = [rng.randrange(_HASHES) for _ in range(rng.randrange(5))]
    keys = [b"%032x:%b\0\0\0\0" % (1, _named(number).to_bytes(8, "big")) for number in numbers]
    packed = (pack_keys(keys) or b"") if keys else b""
    if rng.random() < 0.2:
        packed = damaged(rng, packed)
    fields: list[bytes | int] = [kind, rng.randrange(1000), rng.choice((b"d", b"f", b"o")), packed]
    if kind == b"hello":
        fields = [kind, rng.choice((b"boot1", b"boot1", b"boot2")), 1]
    if rng.random() < 0.15:
        fields = fields[: rng.randint(1, 4)]
    if rng.random() < 0.15:
        fields[rng.randrange(len(fields))] = rng.choice((0, -1, 2**70, b"", b"\xff\0", rng.randbytes(9)))
    return fields


def store_bytes(rng: random.Random) -> bytes:
    """A few such events on the wire, now and then damaged."""
    out = b""
    for _ in range(rng.randint(1, 4)):
        fields = store_message(rng)
        out += b"*%d\r\n" % len(fields)
        for field in fields:
            out += b":%d\r\n" % field if isinstance(field, int) else b"$%d\r\n%b\r\n" % (len(field), field)
    if rng.random() < 0.5:
        out = damaged(rng, out)
    return out
