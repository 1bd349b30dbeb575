"""Our own commands, all with ``KV.`` in front: questions about many chunks at once, many chunks in one round trip, pins
and prefetching. Keys come plain, or packed in one argument (`kvhearth.store.protocol.packed`).
"""

from __future__ import annotations

import json

from kvhearth.store.protocol.packed import MAGIC, MAX_PACKED_BYTES, PackedKeysError, unpack_keys
from kvhearth.store.protocol.resp import MAX_ARG_BYTES
from kvhearth.store.server import keyspace
from kvhearth.store.server.session import Session


def match(session: Session, count: int) -> None:
    """KV.MATCH: a letter for each leading key that is there, the tier it is in; all are touched."""
    keys = read_keys(session, count)
    if keys is not None:
        session.replies.bulk(session.store.leading(keys))


def exists(session: Session, count: int) -> None:
    """KV.EXISTS: a letter for each key: the tier it is in, or ``-``; those that are there are touched."""
    keys = read_keys(session, count)
    if keys is not None:
        session.replies.bulk(session.store.where(keys))


def mget(session: Session, count: int) -> None:
    """KV.MGET: as MGET; each value is sent as soon as it is found, and what is not is null."""
    keys = read_keys(session, count)
    if keys is not None:
        session.store.lift_ahead(keys)
        keyspace.mget(session, keys)


def mput(session: Session, count: int) -> None:
    """KV.MPUT key value …: an answer for each, so that one refusal does not hide what was stored."""
    refusals = keyspace.receive_pairs(session, count)
    session.replies.array(len(refusals))
    for refusal in refusals:
        if refusal:
            session.replies.error(refusal)
        else:
            session.replies.ok()


def prefetch(session: Session, count: int) -> None:
    """KV.PREFETCH: lift into DRAM soon; how many are there or on their way."""
    keys = read_keys(session, count)
    if keys is not None:
        session.replies.integer(session.store.prefetch(keys))


def pin(session: Session, count: int) -> None:
    """KV.PIN seconds key …: keep from eviction for so long; how many of the keys are there."""
    seconds = session.reader.arg()
    keys = read_keys(session, count - 1)
    if keys is None:
        return
    if not seconds.isdigit() or not 0 < len(seconds) <= 9 or not int(seconds):
        session.replies.error("ERR invalid expire time in 'kv.pin' command")
        return
    session.store.lift_ahead(keys)
    for key in keys:  # what lies below is pinned where pins hold, in DRAM
        slot = session.store.lease(key)
        if slot is not None:
            session.store.table.release(slot)
    table = session.store.table
    pinned = table.pin(keys, float(seconds))
    if pinned is None:
        session.replies.error(
            f"ERR pins take at most half of this store, {table.max_pinned_bytes} bytes and "
            f"{table.max_pinned_items} values: unpin others first"
        )
    else:
        session.replies.integer(pinned)


def unpin(session: Session, count: int) -> None:
    """KV.UNPIN: let pinned values be evicted again; how many of the keys were pinned."""
    keys = read_keys(session, count)
    if keys is not None:
        session.replies.integer(session.store.table.unpin(keys))


def stats(session: Session, _args: list[bytes]) -> None:
    """KV.STATS: every figure of INFO and more, as JSON."""
    told = session.figures.stats()
    if not session.sees_everything:
        told = {name: value for name, value in told.items() if name not in ("namespaces", "groups")}
    session.replies.bulk(json.dumps(told, separators=(",", ":")))


def read_keys(session: Session, count: int) -> list[bytes] | None:
    """The keys that follow the command's name; None when they are refused, which has been answered then.

    Raises:
        ProtocolError, ConnectionGone: the connection cannot go on.
    """
    reader = session.reader
    if count != 2:
        keys = reader.args(count - 1)
    else:
        length = reader.bulk_length(MAX_PACKED_BYTES)
        raw = bytearray(length)
        reader.payload_into([memoryview(raw)])
        try:
            keys = unpack_keys(bytes(raw)) if raw.startswith(MAGIC) else [bytes(raw)]
        except PackedKeysError as error:
            session.replies.error(f"ERR {error}")
            return None
        if len(keys[0]) > MAX_ARG_BYTES:
            session.replies.error(f"ERR key of {length} bytes is too long")
            return None
    if not session.may_use_all(keys):
        session.replies.error(session.no_key)
        return None
    return keys
