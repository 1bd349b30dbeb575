"""A router's configuration as the YAML file that would say the same. Secrets are named, and not shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvhearth.router.config import RouterConfig
from kvhearth.router.settings.table import LEAVES, PER_ENGINE

_UNITS = ("TiB", "GiB", "MiB", "KiB")
_COLUMNS = 120


def as_yaml(config: RouterConfig) -> str:
    """The configuration in force, what is not set left out; relative paths are made whole."""
    data: dict[str, Any] = {}
    secrets: list[str] = []
    for leaf in LEAVES:
        value = leaf.of(config)
        if leaf.is_secret:
            secrets += [leaf.path] if value else []
            continue
        if leaf.path in PER_ENGINE or leaf.path == "listen_port":
            continue
        name = leaf.field.name
        if leaf.path == "listen_host":
            name, value = (
                "listen",
                f"[{value}]:{config.listen_port}" if ":" in value else f"{value}:{config.listen_port}",
            )
        elif leaf.path == "policy":
            value = config.policy_name
        elif leaf.path == "engines":
            value = [_engine(config, engine, url) for engine, url in config.engines]
        elif leaf.path == "kv.tokenizer" and value:
            value = Path(value)
        if value is None or value in ("", [], {}, ()):
            continue
        section = data.setdefault(leaf.group, {}) if leaf.group else data
        section[name] = _plain(value, is_size=name.endswith("_bytes"))
    text = yaml.safe_dump(data, sort_keys=False, width=_COLUMNS)
    return text + "".join(f"# {name} is set, and not shown\n" for name in secrets)


def _engine(config: RouterConfig, name: str, url: str) -> dict[str, Any]:
    engine: dict[str, Any] = {"name": name, "url": url}
    if name in config.roles:
        engine["role"] = config.roles[name]
    if name in config.data_parallel:
        engine["data_parallel"] = config.data_parallel[name]
    if (source := config.kv.events.get(name)) is not None:
        said = {"kv_events": source.events, "kv_replay": source.replay, "kv_snapshot": source.snapshot}
        engine |= {key: address for key, address in said.items() if address}
    return engine


def _plain(value: Any, *, is_size: bool) -> Any:
    if is_size:
        return size_text(value)
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, (tuple, list)) else value


def size_text(nbytes: int) -> str | int:
    """Bytes in the largest unit that they are a whole number of."""
    for unit, bits in zip(_UNITS, (40, 30, 20, 10), strict=True):
        if nbytes and nbytes % (1 << bits) == 0:
            return f"{nbytes >> bits}{unit}"
    return nbytes
