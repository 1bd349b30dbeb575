"""The tenants file: who there is, the digests of their keys, and their limits. Reads it, and keeps nothing.

What stands in a wrong place may be a key, so errors name places and never show what stands there.
"""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvhearth.errors import UserError
from kvhearth.settings import read_yaml

MOST_TENANTS = 10_000
MOST_KEYS = 16
OTHERS = "other"
"""What metrics call those tenants together that have no label of their own."""
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_REMEDY_KEY = "make one with 'kvhearth router key' and write the line that it shows"


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """What the file says of one tenant.

    Args:
        name: 1 to 64 letters, digits, ``_``, ``.``, ``@`` or ``-``.
        keys: SHA-256 of each of its keys. Keys are 256 random bits, so that a plain hash cannot be searched.
        priority: in the queue, higher goes first; -100 to 100.
        weight: share of the engines among tenants of one priority that wait.
        max_concurrency: requests at once, those that wait too; None for any number.
        max_waiting: requests that may wait in the queue; 0 for the router's default.
        requests_per_minute, tokens_per_minute: None for any number; tokens are those of prompts and answers.
        group: tenants of one group share cached KV; "" is the pool's common group, which has no salt.
        models: patterns of the names it may use.
    """

    name: str
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    priority: int = 0
    weight: float = 1.0
    max_concurrency: int | None = None
    max_waiting: int = 0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    group: str = ""
    models: tuple[str, ...] = ("*",)


FIELDS = tuple(spec.name for spec in fields(TenantSpec) if spec.name not in ("name", "group"))
NAMES = (*FIELDS, "isolation", "group")


def read_tenants(path: Path) -> dict[str, TenantSpec]:
    """The tenants of a file, by name.

    Raises:
        UserError: it cannot be read, others than its owner and group may read it, or an entry is impossible.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"cannot read it ({error.strerror})", where=str(path), remedy="give a tenants file") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise UserError("everybody on this machine may read it", where=str(path), remedy=f"chmod o= {path}")
    data = read_yaml(path)
    tenants = data.get("tenants") if isinstance(data, dict) else None
    if not isinstance(tenants, dict) or len(tenants) > MOST_TENANTS or len(data) > 1:
        remedy = f"write 'tenants:' and below it up to {MOST_TENANTS} of them by name"
        raise UserError("this is no tenants file", where=str(path), remedy=remedy)
    specs = {str(name): _spec(str(name), entry, f"{path}: {name}") for name, entry in tenants.items()}
    owner: dict[bytes, str] = {}
    for spec in specs.values():
        for key in spec.keys:
            if owner.setdefault(key, spec.name) != spec.name:
                remedy = "give each tenant keys of its own"
                raise UserError(f"{spec.name} and {owner[key]} have the same key", where=str(path), remedy=remedy)
    return specs


def _spec(name: str, entry: Any, where: str) -> TenantSpec:
    if not _NAME.fullmatch(name) or name == OTHERS:
        remedy = f"use up to 64 letters, digits, _ . @ and -, and not {OTHERS}"
        raise UserError("not a tenant's name", where=where, remedy=remedy)
    if not isinstance(entry, dict):
        raise UserError("not a mapping", where=where, remedy='write {keys: ["sha256:…"]}')
    for key in entry:
        if key not in NAMES:
            near = difflib.get_close_matches(str(key), NAMES, 1)
            remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(NAMES)}"
            raise UserError("there is a field of a name that is not known", where=where, remedy=remedy)
    return TenantSpec(
        name,
        keys=_keys(entry.get("keys", ()), f"{where}.keys"),
        priority=_whole(entry, "priority", where, -100, 100) or 0,
        weight=_weight(entry.get("weight", 1.0), f"{where}.weight"),
        max_concurrency=_whole(entry, "max_concurrency", where, 1),
        max_waiting=_whole(entry, "max_waiting", where, 1) or 0,
        requests_per_minute=_whole(entry, "requests_per_minute", where, 1),
        tokens_per_minute=_whole(entry, "tokens_per_minute", where, 1),
        group=_group(name, entry, where),
        models=_models(entry.get("models", ("*",)), f"{where}.models"),
    )


def _keys(value: Any, where: str) -> tuple[bytes, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MOST_KEYS:
        raise UserError(f"not a list of up to {MOST_KEYS} digests", where=where, remedy=_REMEDY_KEY)
    found = [_DIGEST.fullmatch(str(one)) for one in value]
    if not all(found):
        raise UserError("an entry is not sha256: and 64 hex digits", where=where, remedy=_REMEDY_KEY)
    return tuple(bytes.fromhex(one[1]) for one in found if one)


def _whole(entry: Mapping[str, Any], name: str, where: str, least: int, most: int = 10**12) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError("not a number that will do", where=f"{where}.{name}", remedy=f"use {least} up to {most}")
    return value


def _weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 1000:
        raise UserError("not a number that will do", where=where, remedy="use 0.001 up to 1000")
    return float(value)


def _group(name: str, entry: Mapping[str, Any], where: str) -> str:
    isolation, group = entry.get("isolation", "shared"), entry.get("group")
    if isolation not in ("shared", "isolated") or (group is not None and "isolation" in entry):
        remedy = "write isolation: shared, isolation: isolated, or group: NAME"
        raise UserError("isolation is something else", where=where, remedy=remedy)
    if group is None:
        return f"tenant {name}" if isolation == "isolated" else ""
    if not isinstance(group, str) or not _NAME.fullmatch(group):
        raise UserError("that cannot name a group", where=f"{where}.group", remedy="use letters, digits, _ . -")
    return f"group {group}"


def _models(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) and one for one in value):
        raise UserError("not a list of patterns", where=where, remedy='write models: ["llama*"]')
    return tuple(value)
