"""Puts a router's configuration together from what is given, and names the place of whatever cannot work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhearth.errors import UserError
from kvhearth.router.config import RouterConfig, parse_listen
from kvhearth.router.settings.engines import Told, data_parallel_of, event_sources_of, read_engines
from kvhearth.router.settings.table import LEAVES, PER_ENGINE, TABLE, group_types
from kvhearth.settings import Given, Setting, read, read_secret_file

_PLACES = {
    "alias": "aliases",
    "session header": "session_header",
    "decisions kept": "decisions_kept",
    "cost model": "kv.model",
    "kv events": "kv.events",
    "data parallel": "data_parallel",
    "role": "roles",
}
"""Settings by what the configuration's own errors call them, where that differs."""


def read_router_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str], config_file: Path | None = None
) -> RouterConfig:
    """The router's configuration: flags win over the environment, that over the YAML file, that over the defaults.

    Args:
        flags: by setting's name, as text, or as a list of texts where a flag may be repeated; None: not given.
        environ: the process's environment.
        config_file: YAML file; None: the one that ``KVHEARTH_ROUTER_CONFIG`` names, if any.

    Raises:
        UserError: a name that is no setting, or a value that cannot work, with its place and what to write instead.
    """
    layers = TABLE.layers(flags, environ, config_file)
    told = read_engines(layers)
    given = TABLE.merged(layers)
    values = _values(given)
    values["data_parallel"] = data_parallel_of(told)
    values["roles"] = {name: role.value for name, role in told.said["roles"].items()}
    values["kv.events"] = event_sources_of(told)
    if told.urls is not None:
        values["engines"] = [(name, url.value) for name, url in told.urls.items()]
    try:
        return _config(values)
    except UserError as error:
        raise UserError(error.what, where=_place(error.where, given, told), remedy=error.remedy) from None


def config_path(environ: Mapping[str, str], config_file: Path | None = None) -> Path | None:
    """The YAML file that `read_router_settings` reads, if any."""
    return TABLE.file(environ, config_file)


def _values(given: Mapping[str, Given]) -> dict[str, Any]:
    """What was given, by dotted field."""
    values: dict[str, Any] = {}
    for setting in TABLE.settings:
        if setting.name in given and setting.name != "engines" and setting.name not in PER_ENGINE:
            values[setting.name] = value = read(setting, given[setting.name])
            if isinstance(value, float) and math.isinf(value):
                raise UserError("without an end", where=given[setting.name].where, remedy="write a number")
    for setting in TABLE.settings:
        if setting.secret:
            _read_secret(setting, given, values)
    if "listen" in values:
        try:
            values["listen_host"], values["listen_port"] = parse_listen(values.pop("listen"))
        except UserError as error:
            raise UserError(error.what, where=given["listen"].where, remedy=error.remedy) from None
    if "kv.tokenizer" in values:
        values["kv.tokenizer"] = str(values["kv.tokenizer"] or "")
    return values


def _read_secret(setting: Setting, given: Mapping[str, Given], values: dict[str, Any]) -> None:
    file = f"{setting.name}_file"
    path = values.pop(file, None)
    if path is not None:
        values[setting.name] = read_secret_file(path, where=given[file].where)
    if setting.name == "salt_secret" and setting.name in values:
        values[setting.name] = values[setting.name].encode()


def _config(values: Mapping[str, Any]) -> RouterConfig:
    kinds = group_types()
    of_group: dict[str, dict[str, Any]] = {group: {} for group in ("", *kinds)}
    for leaf in LEAVES:
        if leaf.path in values:
            of_group[leaf.group][leaf.field.name] = values[leaf.path]
    groups = {group: kind(**of_group[group]) for group, kind in kinds.items()}
    return RouterConfig(**of_group[""], **groups)


def _place(where: str, given: Mapping[str, Given], told: Told) -> str:
    """Where somebody wrote what the configuration calls ``where``; itself where nobody did."""
    what, _, engine = where.partition(", ")
    name = _PLACES.get(what, what)
    if name in PER_ENGINE and engine in told.said[name]:
        return told.said[name][engine].where
    if what.startswith("engine ") and told.urls and what.removeprefix("engine ") in told.urls:
        return told.urls[what.removeprefix("engine ")].where
    if what == "policy prefix":
        name = f"prefix.{engine}"
    if name not in given and name == "kv.model" and "kv.gpu" in given:
        name = "kv.gpu"
    if name not in given and f"{name}_file" in given:
        name = f"{name}_file"
    return given[name].where if name in given else where
