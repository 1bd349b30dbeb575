"""Reader of recorded agent sessions: JSON files whose requests name the prompt's blocks by ids that count within the
file (format: github.com/callanjfox/kv-cache-tester). Gives lengths, arrivals and which text is equal, not the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvhearth.errors import UserError
from kvhearth.planner.workload import Segment, Slo, Turn, User, Workload

_SECOND_NS = 1_000_000_000
_SESSION_SEED = 0x4147 << 48  # keeps block ids apart from generated seeds and from other traces' ids
_SESSION_BITS, _ID_BITS = 16, 32
_REMEDY = "give a session with block_size and requests, each with t, in, out and hash_ids"


def read_sessions(folder: Path) -> Workload:
    """All sessions of ``folder`` (``*.json``), begun at once; each request is one user's one turn, at its own time.

    Raises:
        UserError: no such file, none in the folder, or one that breaks the format; names the file and the field.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise UserError("no session (*.json) in this folder", where=str(folder), remedy="give a folder with sessions")
    if len(paths) >= 1 << _SESSION_BITS:
        raise UserError(f"{len(paths):,} sessions", where=str(folder), remedy="give fewer than 65,536")
    users = [user for number, path in enumerate(paths) for user in _users(path, number)]
    if not users:
        raise UserError("no session has a request", where=str(folder), remedy=_REMEDY)
    users.sort(key=lambda user: user.start_ns)
    note = f"{len(users):,} requests of {len(paths):,} sessions in {folder.name}"
    return Workload(folder.name, tuple(users), Slo(), note)


def _users(path: Path, number: int) -> Iterator[User]:
    session = _session(path)
    block_tokens = _whole(session, "block_size", 1, f"{path}: block_size")
    if not isinstance(session.get("requests"), list):
        raise UserError("no list of requests", where=f"{path}: requests", remedy=_REMEDY)
    base = _SESSION_SEED + (number << _ID_BITS)
    for index, request in enumerate(session["requests"]):
        where = f"{path}: requests[{index}]"
        if not isinstance(request, dict):
            raise UserError(f"{request!r:.40} is no object", where=where, remedy=_REMEDY)
        prompt, output = _whole(request, "in", 1, f"{where}.in"), _whole(request, "out", 0, f"{where}.out")
        start = request.get("t")
        if not isinstance(start, int | float) or isinstance(start, bool) or not 0 <= start < 1 << 32:
            raise UserError(f"{start!r:.40} is no time in seconds", where=f"{where}.t", remedy=_REMEDY)
        ids = request.get("hash_ids")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << _ID_BITS for i in ids):
            raise UserError("not a list of whole numbers below 2**32", where=f"{where}.hash_ids", remedy=_REMEDY)
        full, rest = divmod(prompt, block_tokens)
        if len(ids) not in {full, full + bool(rest)}:
            raise UserError(
                f"{len(ids)} ids for {prompt} tokens in blocks of {block_tokens}",
                where=f"{where}.hash_ids",
                remedy=_REMEDY,
            )
        segments = [Segment(base + i, block_tokens) for i in ids[:full]]
        if rest:  # where the part of a block has no id of its own, nothing else shares it
            own = ids[full] if len(ids) > full else (1 << _ID_BITS) - 1 - index
            segments.append(Segment(base + own, rest))
        yield User(f"{path.stem}-{index}", path.stem, int(start * _SECOND_NS), (Turn(tuple(segments), max(1, output)),))


def _session(path: Path) -> dict[str, Any]:
    try:
        session: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the session ({error.strerror})", where=str(path), remedy="check it") from None
    except ValueError as error:
        raise UserError(f"not JSON ({error})", where=str(path), remedy=_REMEDY) from None
    if not isinstance(session, dict):
        raise UserError(f"{type(session).__name__} instead of an object", where=str(path), remedy=_REMEDY)
    return session


def _whole(values: dict[str, Any], field: str, least: int, where: str) -> int:
    value = values.get(field)
    if type(value) is not int or not least <= value < 1 << 40:
        raise UserError(f"{value!r:.40} is no whole number of at least {least}", where=where, remedy=_REMEDY)
    return value
