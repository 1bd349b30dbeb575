"""The table of the router's settings, made from the fields of its configuration. Reads nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from kvhearth.router.config import RouterConfig
from kvhearth.router.config.parsing import says
from kvhearth.settings import Setting, Table, default_text

PREFIX = "KVHEARTH_ROUTER_"

_TITLES = {
    "": "Router",
    "limits": "Limits",
    "timeouts": "Timeouts",
    "health": "Health checks",
    "queue": "Queue",
    "resilience": "Retries and breakers",
    "discovery": "Discovery of engines",
    "kv": "Policy kv-aware",
    "prefix": "Policy prefix",
    "disaggregation": "Prefill and decode apart",
    "tls": "TLS",
}

PER_ENGINE = {
    "data_parallel": ("data_parallel", "8"),
    "roles": ("role", "prefill"),
    "kv.events": ("kv_events", "tcp://host:5557"),
    "kv.replay": ("kv_replay", "tcp://host:5558"),
    "kv.snapshot": ("kv_snapshot", "host:9100"),
}
"""Settings that a flag gives as ``name=value``: their key in an engine of the YAML file, and an example."""

_NEED_THEIR_GROUP = {"health", "prefix"}
"""Groups whose names say too little in a flag without it."""

_PREFIX_SAYS = {
    "max_pieces": says("Pieces of 256 bytes of prompts that are remembered at most.", restart=True),
    "load_factor": says("Engines above this multiple of the mean load, and the slack, are passed over.", restart=True),
    "load_slack_tokens": says(
        "Tokens in flight above the mean that are no reason yet to pass over an engine.", restart=True
    ),
    "min_share": says("A match of a smaller share of the prompt counts as none.", restart=True),
}

_REPLAY_HELP = "Where an engine replays its KV events: name=tcp://host:port. Repeatable."
_SNAPSHOT_HELP = "Where an engine tells what it holds: name=host:port. Repeatable."
_POLICY_HELP = " Not given: kv-aware where engines tell KV events, else prefix."
_VARIABLES = {
    "kv.store_password": "KVHEARTH_STORE_PASSWORD",
    "kv.snapshot_token": "KVHEARTH_SNAPSHOT_TOKEN",
}
"""Shared with the store and the engines, and so called as there."""


class Leaf(NamedTuple):
    """A field of the configuration that holds a value, not a group of them."""

    group: str
    field: Field[Any]
    annotation: Any

    @property
    def path(self) -> str:
        """Its dotted name."""
        return f"{self.group}.{self.field.name}" if self.group else self.field.name

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What is said of it: ``help``, ``flag``, ``restart``."""
        return _PREFIX_SAYS[self.field.name] if self.group == "prefix" else self.field.metadata

    @property
    def is_secret(self) -> bool:
        """Whether nobody is to see it."""
        return not self.field.repr

    def of(self, config: RouterConfig) -> Any:
        """Its value."""
        return getattr(getattr(config, self.group) if self.group else config, self.field.name)


def group_types() -> dict[str, type[Any]]:
    """The groups of settings, by the field that holds them."""
    hints = get_type_hints(RouterConfig).items()
    return {name: kind for name, kind in hints if isinstance(kind, type) and is_dataclass(kind)}


PANELS = {group: _TITLES.get(group, group.replace("_", " ").capitalize()) for group in {**_TITLES, **group_types()}}
"""Titles of the groups, in the order of the help."""


def _leaves() -> tuple[Leaf, ...]:
    groups = group_types()
    owners: dict[str, type[Any]] = {"": RouterConfig, **groups}
    found: list[Leaf] = []
    for group, owner in owners.items():
        hints = get_type_hints(owner)
        found += [
            Leaf(group, field, hints[field.name])
            for field in fields(owner)
            if field.init and (group or field.name not in groups)
        ]
    return tuple(sorted(found, key=lambda leaf: list(PANELS).index(leaf.group)))


LEAVES = _leaves()
"""Every value of the configuration, group by group."""


_PLAIN_KINDS: dict[Any, str] = {int: "count", float: "number", bool: "switch", str: "text", Path: "path"}
_OTHER_KINDS: dict[Any, str] = {Sequence: "texts", Mapping: "pairs", Literal: "text"}
_KINDS_BY_UNIT = {"_bytes": "size", "_seconds": "seconds"}
_KINDS_BY_NAME = {"engines": "engines", "kv.tokenizer": "path"}  # the latter is a path of ours that is kept as text


def _kind(leaf: Leaf) -> str:
    """How the value is written; a type that nothing here can read is a mistake of ours."""
    if leaf.path in _KINDS_BY_NAME:
        return _KINDS_BY_NAME[leaf.path]
    plain = [part for part in get_args(leaf.annotation) if part is not type(None)]
    kind = plain[0] if type(None) in get_args(leaf.annotation) else leaf.annotation
    for unit, name in _KINDS_BY_UNIT.items():
        if kind in (int, float) and leaf.field.name.endswith(unit):
            return name
    return _PLAIN_KINDS[kind] if kind in _PLAIN_KINDS else _OTHER_KINDS[get_origin(kind)]


def _flag(leaf: Leaf, often: Counter[str]) -> str:
    if leaf.metadata["flag"]:
        return str(leaf.metadata["flag"])
    name = leaf.field.name
    needs_group = leaf.group in _NEED_THEIR_GROUP or (leaf.group and often[name] > 1)
    return f"--{leaf.group}-{name}".replace("_", "-") if needs_group else f"--{name}".replace("_", "-")


def _default(leaf: Leaf, kind: str) -> str:
    default = leaf.field.default
    if kind in ("engines", "texts", "pairs") or default == "" or leaf.path == "policy":
        return ""
    return default_text(default, kind)


def _variable(name: str) -> str:
    return _VARIABLES.get(name) or f"{PREFIX}{name.replace('.', '_').upper()}"


def _secret(leaf: Leaf) -> list[Setting]:
    file = f"{leaf.path}_file"
    flag = f"--{leaf.field.name}-file".replace("_", "-")
    help_ = leaf.metadata["help"]
    return [
        Setting(leaf.path, "text", "", f"{help_} Environment only.", variable=_variable(leaf.path), secret=True),
        Setting(
            file, "path", "none", f"{help_.rstrip('.')}, in a file of its own.", flag=flag, variable=_variable(file)
        ),
    ]


def _settings() -> list[Setting]:
    often = Counter(leaf.field.name for leaf in LEAVES)
    found: list[Setting] = []
    for leaf in LEAVES:
        if leaf.is_secret:
            found += _secret(leaf)
            continue
        if leaf.path == "listen_port":
            continue
        name, kind = leaf.path, _kind(leaf)
        default, help_ = _default(leaf, kind), leaf.metadata["help"]
        if leaf.path == "listen_host":
            name, default = "listen", f"{leaf.field.default}:{RouterConfig.__dataclass_fields__['listen_port'].default}"
        if leaf.path == "policy":
            help_ += _POLICY_HELP
        optional = type(None) in get_args(leaf.annotation) or kind == "path"
        found.append(_setting(name, kind, default, help_, optional=optional, flag=_flag(leaf, often)))
        if name == "kv.events":
            found.append(_setting("kv.replay", "pairs", "", _REPLAY_HELP, optional=False, flag="--kv-replay"))
            found.append(_setting("kv.snapshot", "pairs", "", _SNAPSHOT_HELP, optional=False, flag="--kv-snapshot"))
    return found


def _setting(name: str, kind: str, default: str, help_: str, *, optional: bool, flag: str) -> Setting:
    instead = ""
    if name in PER_ENGINE:
        key, example = PER_ENGINE[name]
        instead = f"it with its engine, as engines: [{{url: http://host:8000, {key}: {example}}}]"
    return Setting(name, kind, default, help_, optional, flag=flag, variable=_variable(name), instead=instead)


TABLE = Table(_settings(), prefix=PREFIX, command="kvhearth router serve", example="'listen: 127.0.0.1:8000'")
"""Every setting, in the order of the help."""
