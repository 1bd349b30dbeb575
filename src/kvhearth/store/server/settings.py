"""A store server's settings from flags, the environment (``KVHEARTH_STORE_<NAME>``), a YAML file and the defaults.

What may be set is `StoreConfig`'s business, and how text is read is that of `kvhearth.settings`; this joins the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from kvhearth import settings as table
from kvhearth.errors import UserError
from kvhearth.settings import Given, Setting, Table, default_text, read, shown
from kvhearth.store.policies import POLICY_NAMES
from kvhearth.store.server.config import DEFAULT_CAPACITY_BYTES, StoreConfig, setting_name
from kvhearth.store.server.passwords import read_password_file
from kvhearth.units import parse_bytes

PREFIX = "KVHEARTH_STORE_"


def read_settings(
    flags: Mapping[str, str | bool | None], environ: Mapping[str, str], config_file: Path | None = None
) -> StoreConfig:
    """The server's settings.

    Args:
        flags: by setting's name, as text (switches: bool); None: not given.
        environ: the process's environment.
        config_file: YAML mapping of names to values; None: the one that ``KVHEARTH_STORE_CONFIG`` names, if any.

    Raises:
        UserError: a name that is no setting, or a value that cannot work, with its place and what to write instead.
    """
    return _config_of(TABLE.merged(TABLE.layers(flags, environ, config_file)))


def markdown_table() -> str:
    """Every setting as a table, for the reference page."""
    return table.markdown_table(SETTINGS)


def _config_of(given: dict[str, Given]) -> StoreConfig:
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        if setting.name in given and setting.kind not in ("share", "map"):
            values[setting.field] = read(setting, given[setting.name])
    if "password_file" in given:
        path = values.pop("password_file")
        values["password"] = read_password_file(path, where=given["password_file"].where)
    if "listen" not in values and values.get("unix") is not None:
        values["listen"] = None
    capacity_bytes = values.get("capacity_bytes", DEFAULT_CAPACITY_BYTES)
    for setting in SETTINGS:
        if setting.name in given and setting.kind in ("share", "map"):
            values[setting.field] = _read_shares(setting, given[setting.name], capacity_bytes)
    try:
        return StoreConfig(**values)
    except UserError as error:
        place = given[error.where].where if error.where in given else error.where
        raise UserError(error.what, where=place, remedy=error.remedy) from None


def _read_shares(setting: Setting, given: Given, capacity_bytes: int) -> Any:
    if setting.kind == "share":
        return _share(given.value, given.where, capacity_bytes)
    if not isinstance(given.value, dict):
        raise UserError(f"{shown(given.value)} is not a mapping", where=given.where, remedy="write NAMESPACE: 10GiB")
    quotas: dict[str, int] = {}
    for name, value in given.value.items():
        if not isinstance(name, str):  # YAML takes 00000012 for a number
            raise UserError(f"{name!r} is read as a number", where=given.where, remedy="put the name in quotes")
        quotas[name] = _share(value, f"{given.where}.{name}", capacity_bytes)
    return quotas


def _share(value: Any, where: str, capacity_bytes: int) -> int:
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            percent = float(value.strip()[:-1])
        except ValueError:
            percent = -1
        if not 0 < percent <= 100:
            raise UserError(f"{shown(value)} is no share", where=where, remedy="write more than 0% and at most 100%")
        return max(1, int(capacity_bytes * percent / 100))
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise UserError(f"{shown(value)} is not a size", where=where, remedy="write a size such as 10GiB, or 25%")
    return parse_bytes(value, where=where)


def _settings() -> list[Setting]:
    kinds = {"int": "count", "float": "seconds", "bool": "switch", "Mapping[str, int]": "map"}
    found: list[Setting] = []
    for field in fields(StoreConfig):
        annotation = str(field.type)
        kind = kinds.get(annotation, "path" if annotation.startswith("Path") else "text")
        if field.name.endswith("_bytes"):
            kind = "share" if field.name.endswith("quota_bytes") else "size"
        help_ = field.metadata["help"] + (f" One of {', '.join(POLICY_NAMES)}." if field.name == "policy" else "")
        default = "" if field.default is MISSING else default_text(field.default, kind)
        found.append(_setting(field.name, kind, default, help_, optional=annotation.endswith("| None")))
        if field.name == "password":
            file_help = "File with the password that clients must AUTH with, as the user 'default' with every right."
            found.append(_setting("password_file", "path", "none", file_help, optional=True))
    return found


def _setting(field: str, kind: str, default: str, help_: str, *, optional: bool) -> Setting:
    name = setting_name(field)
    return Setting(
        name,
        kind,
        default,
        help_,
        optional,
        flag=None if name in ("password", "quotas") else f"--{name.replace('_', '-')}",
        variable=None if name == "quotas" else f"{PREFIX}{name.upper()}",
        secret=name == "password",
        field=field,
    )


TABLE = Table(_settings(), prefix=PREFIX, command="kvhearth store serve", example="'capacity: 64GiB'")
SETTINGS = TABLE.settings
"""Every setting, in the order of the help."""
CONFIG_VARIABLE = TABLE.config_variable
