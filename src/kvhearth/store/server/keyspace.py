"""Redis's commands on keys and values: what each does to the store and answers. Values that arrive are received
straight into the pool.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from kvhearth.store.dram.allocator import PAGE_BYTES, pages_for
from kvhearth.store.dram.table import Published, Upload
from kvhearth.store.protocol.limits import MAX_KEY_BYTES
from kvhearth.store.protocol.packed import MAGIC
from kvhearth.store.server.session import Session

OUT_OF_MEMORY = "OOM command not allowed when used memory > 'maxmemory'."
OVER_QUOTA = "OOM the quota of this value's namespace or sharing group is used up"
SYNTAX = "ERR syntax error"
NOT_A_NUMBER = "ERR value is not an integer or out of range"

_ITEM_OVERHEAD_BYTES = 400
_LONGEST_SECONDS = 10 * 365 * 86_400
_SCAN_MOST = 10_000
_MAX_PATTERN_BYTES = 2 * MAX_KEY_BYTES
_BELOW = 1 << 58
"""SCAN cursors from here on are for the lower tiers: where `Tiered.keys_below` goes on."""


def get(session: Session, args: list[bytes]) -> None:
    reply_value(session, args[0])


def mget(session: Session, args: list[bytes]) -> None:
    # Leased one by one as they are sent: a long MGET pins little memory, and is not a snapshot.
    session.replies.array(len(args))
    for key in args:
        reply_value(session, key)


def exists(session: Session, args: list[bytes]) -> None:
    session.replies.integer(sum(session.store.length(key) is not None for key in args))


def touch(session: Session, args: list[bytes]) -> None:
    letters = session.store.where(args)
    session.replies.integer(len(letters) - letters.count(b"-"))


def delete(session: Session, args: list[bytes]) -> None:
    session.replies.integer(session.store.delete(args))


def strlen(session: Session, args: list[bytes]) -> None:
    session.replies.integer(session.store.length(args[0]) or 0)


def ttl(session: Session, args: list[bytes]) -> None:
    _reply_ttl(session, args[0], 1.0)


def pttl(session: Session, args: list[bytes]) -> None:
    _reply_ttl(session, args[0], 1000.0)


def expire(session: Session, args: list[bytes]) -> None:
    digits = args[1].removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 12:
        session.replies.error(NOT_A_NUMBER)
    elif int(args[1]) > _LONGEST_SECONDS:
        session.replies.error("ERR invalid expire time in 'expire' command")
    elif int(args[1]) <= 0:
        session.replies.integer(session.store.delete(args[:1]))
    else:
        session.replies.integer(session.store.expire(args[0], float(args[1])))


def dbsize(session: Session, _args: list[bytes]) -> None:
    session.replies.integer(session.store.count())


def flushdb(session: Session, args: list[bytes]) -> None:
    if args and (len(args) > 1 or args[0].upper() not in (b"SYNC", b"ASYNC")):
        session.replies.error(SYNTAX)
        return
    session.store.clear()
    session.replies.ok()


def memory(session: Session, args: list[bytes]) -> None:
    if args[0].upper() != b"USAGE" or len(args) not in (2, 4):
        session.replies.error("ERR unknown subcommand or wrong number of arguments for 'memory', try MEMORY USAGE key")
        return
    nbytes = session.store.length(args[1])
    if nbytes is None:
        session.replies.null()
    else:
        session.replies.integer(pages_for(nbytes) * PAGE_BYTES + len(args[1]) + _ITEM_OVERHEAD_BYTES)


def scan(session: Session, args: list[bytes]) -> None:
    pattern, count, is_string = None, 10, True
    options = iter(args[1:])
    for option in options:
        value = next(options, None)
        if value is None:
            session.replies.error(SYNTAX)
            return
        if option.upper() == b"MATCH" and len(value) > _MAX_PATTERN_BYTES:
            session.replies.error(f"ERR a pattern may have {_MAX_PATTERN_BYTES} bytes")
            return
        elif option.upper() == b"MATCH":
            pattern = _glob(value)
        elif option.upper() == b"COUNT" and value.isdigit() and len(value) < 10 and int(value) > 0:
            count = min(int(value), _SCAN_MOST)
        elif option.upper() == b"COUNT" and not value.removeprefix(b"-").isdigit():
            session.replies.error(NOT_A_NUMBER)
            return
        elif option.upper() == b"TYPE":
            is_string = value.lower() == b"string"
        else:
            session.replies.error(SYNTAX)
            return
    if not args[0].isdigit() or len(args[0]) > 18:
        session.replies.error("ERR invalid cursor")
        return
    keys, cursor = _some_keys(session, int(args[0]), count)
    if pattern is not None:
        keys = [key for key in keys if pattern.fullmatch(key)]
    keys = [key for key in keys if is_string and session.may_use(key)]
    session.replies.array(2)
    session.replies.bulk(str(cursor))
    session.replies.array(len(keys))
    for key in keys:
        session.replies.bulk(key)


def set_value(session: Session, count: int) -> None:
    """SET: the value goes from the socket into the pool, and under its key once it is all there. Whatever is refused
    is still read to its end, so that a pipeline goes on.

    Raises:
        ProtocolError, ConnectionGone: nothing is stored.
    """
    key = session.reader.arg()
    received = receive(session, key)
    try:
        options = session.reader.args(count - 3)
    except BaseException:
        drop(session, received)
        raise
    wish = _read_options(options)
    if isinstance(wish, str) or isinstance(received, str):
        drop(session, received)
        session.replies.error(wish if isinstance(wish, str) else str(received))
        return
    ttl_seconds, only_if_present = wish
    _reply_published(
        session, session.store.publish(key, received, ttl_seconds=ttl_seconds, only_if_present=only_if_present)
    )


def mset(session: Session, count: int) -> None:
    """MSET: each value is there as soon as it has arrived whole; the first refusal is the answer.

    Raises:
        ProtocolError, ConnectionGone: what came before is stored.
    """
    refusals = [refusal for refusal in receive_pairs(session, count) if refusal]
    if refusals:
        session.replies.error(refusals[0])
    else:
        session.replies.ok()


def receive_pairs(session: Session, count: int) -> list[str]:
    """Store ``(count - 1) / 2`` keys and values as they arrive; for each why it was refused, or nothing."""
    refusals = []
    for _ in range((count - 1) // 2):
        key = session.reader.arg()
        received = receive(session, key)
        refusals.append(received if isinstance(received, str) else _refusal(session.store.publish(key, received)))
    return refusals


def receive(session: Session, key: bytes) -> Upload | str:
    """Receive one value into the pool; why not, if it is refused (it is then read and dropped).

    Raises:
        ProtocolError, ConnectionGone: nothing is kept.
    """
    reader, table = session.reader, session.store.table
    nbytes = reader.bulk_length()
    refusal = _refusal_of_value(session, key, nbytes)
    upload = None if refusal else table.reserve(nbytes)
    if upload is None:
        reader.discard(nbytes)
        return refusal or OUT_OF_MEMORY
    try:
        reader.payload_into(table.upload_views(upload))
    except BaseException:
        table.abandon(upload)
        raise
    return upload


def drop(session: Session, received: Upload | str) -> None:
    """Give up what was received, if it was."""
    if isinstance(received, Upload):
        session.store.table.abandon(received)


def reply_value(session: Session, key: bytes) -> None:
    """The value under ``key`` as a bulk string, or null."""
    slot = session.store.lease(key)
    if slot is None:
        session.counts.misses += 1
        session.replies.null()
        return
    session.counts.hits += 1
    table = session.store.table
    session.replies.value(table.views(slot), table.nbytes(slot), lambda: table.release(slot))


def _reply_published(session: Session, outcome: Published) -> None:
    if outcome is Published.UNWANTED:
        session.replies.null()
    elif outcome is Published.STORED:
        session.replies.ok()
    else:
        session.replies.error(_refusal(outcome))


def _refusal(outcome: Published) -> str:
    return {Published.NO_ROOM: OUT_OF_MEMORY, Published.OVER_QUOTA: OVER_QUOTA}.get(outcome, "")


def _refusal_of_value(session: Session, key: bytes, nbytes: int) -> str:
    limit = session.config.value_limit_bytes
    if len(key) > MAX_KEY_BYTES:
        return f"ERR key of {len(key)} bytes is longer than {MAX_KEY_BYTES}"
    if key.startswith(MAGIC):
        return "ERR a key may not begin like packed keys"
    if nbytes > limit:
        return f"ERR string exceeds maximum allowed size: {nbytes} bytes, this store keeps up to {limit}"
    if not session.may_use(key):
        return session.no_key
    return ""


def _read_options(options: Sequence[bytes]) -> tuple[float | None, bool | None] | str:
    ttl_seconds: float | None = None
    only_if_present: bool | None = None
    rest = iter(options)
    for option in rest:
        match option.upper():
            case b"NX" if only_if_present is None:
                only_if_present = False
            case b"XX" if only_if_present is None:
                only_if_present = True
            case b"EX" | b"PX" as unit if ttl_seconds is None:
                amount = next(rest, None)
                if amount is None:
                    return SYNTAX
                if not amount.removeprefix(b"-").isdigit() or len(amount) > 15:
                    return NOT_A_NUMBER
                ttl_seconds = int(amount) / (1000 if unit == b"PX" else 1)
                if not 0 < ttl_seconds <= _LONGEST_SECONDS:
                    return "ERR invalid expire time in 'set' command"
            case _:
                return SYNTAX
    return ttl_seconds, only_if_present


def _reply_ttl(session: Session, key: bytes, per_second: float) -> None:
    seconds = session.store.table.ttl_seconds(key)
    if seconds is None:
        session.replies.integer(-2 if session.store.length(key) is None else -1)
    else:
        session.replies.integer(-1 if seconds == math.inf else math.ceil(seconds * per_second))


def _glob(pattern: bytes) -> re.Pattern[bytes]:
    """Redis's patterns as a regular expression that does not search back past a ``*`` once what follows it is found."""
    pieces, at = [b""], 0
    while at < len(pattern):
        char = pattern[at : at + 1]
        if char == b"*":
            pieces.append(b"")
        elif char == b"?":
            pieces[-1] += b"."
        elif char == b"[":
            among, at = _glob_class(pattern, at + 1)
            pieces[-1] += among
        else:
            at += char == b"\\" and at + 1 < len(pattern)
            pieces[-1] += re.escape(pattern[at : at + 1])
        at += 1
    first, *middle = pieces
    last = middle.pop() if middle else None
    text = first + b"".join(b"(?>.*?%b)" % piece for piece in middle if piece)
    return re.compile(text if last is None else text + b".*" + last, re.DOTALL)


def _glob_class(pattern: bytes, at: int) -> tuple[bytes, int]:
    """``[...]`` from behind its bracket on as a regular expression, and where it ends."""
    negated = pattern[at : at + 1] == b"^"
    at += negated
    members = b""
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        at += pattern[at : at + 1] == b"\\" and at + 1 < len(pattern)
        low = high = pattern[at]
        if pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern) and pattern[at - 1 : at] != b"\\":
            low, high = sorted((low, pattern[at + 2]))
            at += 2
        members += b"\\x%02x-\\x%02x" % (low, high)
        at += 1
    if not members:
        return (b"." if negated else b"(?!)"), at
    return b"[%b%b]" % (b"^" if negated else b"", members), at


def _some_keys(session: Session, cursor: int, count: int) -> tuple[list[bytes], int]:
    store = session.store
    if cursor < _BELOW:
        keys, cursor = store.table.keys_from(cursor, count)
        return keys, cursor or (_BELOW if store.tiers else 0)
    keys, cursor = store.keys_below(cursor - _BELOW, count)
    return keys, cursor and _BELOW + cursor
