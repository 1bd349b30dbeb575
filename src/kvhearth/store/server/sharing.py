"""Commands for clients of the same machine and user that map the store's memory: KV.ATTACH hands over its descriptor,
KV.LEASE and KV.RESERVE say where in it a value lies or goes. What is lent ends with the connection.

Whoever has mapped the memory can read and change all of it, so it is not handed over where users are kept apart.
"""

from __future__ import annotations

import os

from kvhearth.store.dram.table import Published
from kvhearth.store.protocol.grants import (
    Grant,
    GrantFormatError,
    Refusal,
    pack_grants,
    refuse,
    unpack_numbers,
    unpack_sizes,
)
from kvhearth.store.protocol.limits import MAX_KEY_BYTES
from kvhearth.store.protocol.packed import MAGIC
from kvhearth.store.server.chunks import read_keys
from kvhearth.store.server.loans import Loans
from kvhearth.store.server.session import Session
from kvhearth.store.server.users import RIGHTS

_OUTCOMES = {Published.STORED: b"s", Published.NO_ROOM: b"n", Published.OVER_QUOTA: b"q", None: b"?"}
_NOT_ATTACHED = "ERR this connection has not attached to the store's memory"


def attach(session: Session, _args: list[bytes]) -> None:
    """KV.ATTACH: the length of the store's memory, and with it the descriptor to map (SCM_RIGHTS)."""
    refusal = _refusal(session)
    if refusal:
        session.replies.error(refusal)
        return
    if session.loans is None:
        session.loans = Loans(session.store, session.config.stall_timeout_seconds)
    pool = session.store.table.pool
    session.replies.integer_with_descriptor(pool.nbytes, pool.fd)


def lease(session: Session, count: int) -> None:
    """KV.LEASE key …: a grant for each (`grants`); their bytes stay as they are until KV.RELEASE."""
    keys = read_keys(session, count)
    if keys is None:
        return
    loans = session.loans
    if loans is None:
        session.replies.error(_NOT_ATTACHED)
        return
    grants = loans.lease(keys)
    misses = sum(grant.refusal is Refusal.ABSENT for grant in grants)
    session.counts.misses += misses
    session.counts.hits += sum(grant.refusal is None for grant in grants)
    session.replies.bulk(pack_grants(grants))


def release(session: Session, args: list[bytes]) -> None:
    """KV.RELEASE numbers: end these leases; how many there were."""
    numbers = _numbers(session, args[0])
    if numbers is not None and session.loans is not None:
        session.replies.integer(sum(map(session.loans.release, numbers)))


def reserve(session: Session, count: int) -> None:
    """KV.RESERVE sizes key …: a grant for each value that is to come, until KV.COMMIT or KV.ABANDON."""
    raw = session.reader.arg()
    keys = read_keys(session, count - 1)
    if keys is None:
        return
    loans = session.loans
    if loans is None:
        session.replies.error(_NOT_ATTACHED)
        return
    try:
        sizes = unpack_sizes(raw)
    except GrantFormatError as error:
        session.replies.error(f"ERR {error}")
        return
    if len(sizes) != len(keys):
        session.replies.error(f"ERR {len(sizes)} sizes for {len(keys)} keys")
        return
    session.replies.bulk(
        pack_grants([_reserve(session, loans, key, size) for key, size in zip(keys, sizes, strict=True)])
    )


def commit(session: Session, args: list[bytes]) -> None:
    """KV.COMMIT numbers: publish these uploads; a letter for each: ``s`` stored, ``n`` no room, ``q`` over its quota,
    ``?`` there is no such upload."""
    numbers = _numbers(session, args[0])
    loans = session.loans
    if numbers is not None and loans is not None:
        session.replies.bulk(b"".join([_OUTCOMES[loans.commit(number)] for number in numbers]))


def abandon(session: Session, args: list[bytes]) -> None:
    """KV.ABANDON numbers: give up these uploads; how many there were."""
    numbers = _numbers(session, args[0])
    if numbers is not None and session.loans is not None:
        session.replies.integer(sum(map(session.loans.abandon, numbers)))


def _refusal(session: Session) -> str:
    if not session.config.shared_memory:
        return "ERR this store does not share its memory (shared_memory)"
    if session.peer_uid is None:
        return "ERR memory is shared over a unix socket only"
    if session.peer_uid != os.geteuid():
        return f"ERR memory is shared with the store's own user {os.geteuid()} only, not with {session.peer_uid}"
    user = session.user
    if user is None or user.prefix or not user.rights.issuperset(RIGHTS):
        return "ERR memory is shared with users of every right and every key only"
    return ""


def _reserve(session: Session, loans: Loans, key: bytes, nbytes: int) -> Grant:
    if len(key) > MAX_KEY_BYTES or key.startswith(MAGIC):
        return refuse(Refusal.BAD_KEY)
    if nbytes > session.config.value_limit_bytes:
        return refuse(Refusal.TOO_LARGE)
    return loans.reserve(key, nbytes)


def _numbers(session: Session, packed: bytes) -> tuple[int, ...] | None:
    """The numbers in an argument; None when they are refused, which has been answered then."""
    if session.loans is None:
        session.replies.error(_NOT_ATTACHED)
        return None
    try:
        return unpack_numbers(packed)
    except GrantFormatError as error:
        session.replies.error(f"ERR {error}")
        return None
