"""Readers of recorded workloads. A trace gives lengths, arrivals and which pieces of text are equal, not the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvhearth.errors import UserError
from kvhearth.planner.workload import Segment, Slo, Turn, User, Workload

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens behind one hash id (Mooncake's trace format: github.com/kvcache-ai/Mooncake, FAST25-release/traces)."""

_MILLISECOND_NS = 1_000_000
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_TRACE_SEED = 0x4D43 << 40  # keeps a trace's hash ids apart from generated seeds


class Record(NamedTuple):
    """One line of a Mooncake trace: arrival in ms, lengths in tokens, ids of the prompt's 512-token blocks."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_mooncake(path: Path, requests: int | None = None, *, max_tokens: int | None = None) -> Workload:
    """Each line becomes one user's one turn, at its recorded time; text is shared exactly where hash ids are equal.

    Args:
        path: a JSONL file with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``.
        requests: read only the first so many lines.
        max_tokens: leave out requests whose prompt and output together are longer; the note counts them.

    Raises:
        UserError: no such file, an empty one, or a line that breaks the format; names the line and the field.
    """
    users, skipped, total = [], 0, 0
    for number, record in _records(path):
        if requests is not None and total >= requests:
            break
        total += 1
        if max_tokens is not None and record.input_length + record.output_length > max_tokens:
            skipped += 1
            continue
        turn = Turn(_segments(record), record.output_length)
        users.append(User(f"line-{number}", "trace", record.timestamp * _MILLISECOND_NS, (turn,)))
    if not total:
        raise UserError("the trace is empty", where=str(path), remedy="give one with requests")
    if not users:
        raise UserError(
            f"all {total} requests are longer than the {max_tokens:,} tokens that an engine takes",
            where=str(path),
            remedy="give shorter ones, or more HBM or max_model_len",
        )
    first_ns = min(user.start_ns for user in users)
    moved = tuple(user._replace(start_ns=user.start_ns - first_ns) for user in users)
    left_out = (
        f"; {skipped} of {total} left out, longer than the {max_tokens:,} tokens that an engine takes"
        if skipped
        else ""
    )
    return Workload(path.stem, moved, Slo(), f"{len(users):,} requests of {path.name}{left_out}")


def _segments(record: Record) -> tuple[Segment, ...]:
    *full, last = record.hash_ids
    rest = record.input_length - MOONCAKE_BLOCK_TOKENS * len(full)
    return (*(Segment(_TRACE_SEED + i, MOONCAKE_BLOCK_TOKENS) for i in full), Segment(_TRACE_SEED + last, rest))


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _record(line, f"{path}:{number}")
    except OSError as error:
        raise UserError(f"cannot read the trace ({error.strerror})", where=str(path), remedy="check the path") from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text", where=str(path), remedy="give a Mooncake JSONL trace") from None


def _record(line: str, where: str) -> Record:
    try:
        values: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON ({error.msg})", where=where, remedy="give one JSON object a line") from None
    if not isinstance(values, dict):
        raise UserError(
            f"{type(values).__name__} instead of an object", where=where, remedy=f"give {', '.join(_FIELDS)}"
        )
    for field in _FIELDS:
        if field not in values:
            raise UserError(f"field {field!r} is missing", where=where, remedy=f"give {', '.join(_FIELDS)}")
    for field, least in (("timestamp", 0), ("input_length", 1), ("output_length", 1)):
        value = values[field]
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < 1 << 53:
            raise UserError(f"{field} is {value!r}", where=where, remedy=f"give a number of at least {least}")
    ids, blocks = values["hash_ids"], -(-int(values["input_length"]) // MOONCAKE_BLOCK_TOKENS)
    if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < 1 << 40 for i in ids):
        raise UserError("hash_ids is not a list of whole numbers below 2**40", where=where, remedy="give block ids")
    if len(ids) != blocks:
        raise UserError(
            f"hash_ids has {len(ids)} entries for input_length {values['input_length']}",
            where=where,
            remedy=f"give one id for each {MOONCAKE_BLOCK_TOKENS} tokens ({blocks})",
        )
    return Record(int(values["timestamp"]), int(values["input_length"]), int(values["output_length"]), tuple(ids))
