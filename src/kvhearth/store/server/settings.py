"""A server's settings from where people write them: flags, then the environment (``KVHEARTH_STORE_<NAME>``), then a
YAML file, then the defaults. What may be set is `StoreConfig`'s business; this reads and names the source of an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvhearth.errors import UserError
from kvhearth.store.policies import POLICY_NAMES
from kvhearth.store.server.config import DEFAULT_CAPACITY_BYTES, StoreConfig, setting_name
from kvhearth.store.server.passwords import read_password_file
from kvhearth.units import format_bytes, parse_bytes

PREFIX = "KVHEARTH_STORE_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
_MOST_YAML_BYTES = 2**20
_LONGEST_SHOWN = 60
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WORDS_FOR_NONE = ("", "none")


class Setting(NamedTuple):
    """One setting, as the command line, the YAML file and the reference page present it."""

    name: str
    field: str
    """Of `StoreConfig`; ``password_file`` has none."""
    kind: str
    """One of size, share, count, seconds, switch, text, path, map."""
    default: str
    help: str
    optional: bool = True
    """Whether 'none' may be said."""

    @property
    def flag(self) -> str | None:
        """On the command line; None where it cannot be given there."""
        return None if self.name in ("password", "quotas") else f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str | None:
        """In the environment; None where it cannot be given there."""
        return None if self.name == "quotas" else f"{PREFIX}{self.name.upper()}"

    @property
    def in_yaml(self) -> bool:
        """Whether the YAML file may have it; a password has no place there."""
        return self.name != "password"


class _Given(NamedTuple):
    value: Any
    where: str
    """What errors call its place: a flag, a variable, or file and key."""
    folder: Path | None = None
    """Where a relative path starts from; None: the working directory."""


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
    given: dict[str, _Given] = {}
    if config_file is None and environ.get(CONFIG_VARIABLE):
        config_file = Path(environ[CONFIG_VARIABLE])
    layers = [_from_yaml(config_file) if config_file is not None else {}, _from_environ(environ), _from_flags(flags)]
    for layer in layers:
        if layer.keys() & {"password", "password_file"}:  # one way to say the password takes the other's place
            given = {name: value for name, value in given.items() if name not in ("password", "password_file")}
        given |= layer
    return _config_of(given)


def markdown_table() -> str:
    """Every setting as a table, for the reference page."""
    lines = ["| setting | flag | environment | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for setting in SETTINGS:
        flag, variable = (f"`{place}`" if place else "" for place in (setting.flag, setting.variable))
        name = f"`{setting.name}`" if setting.in_yaml else ""
        default = f"`{setting.default}`" if setting.default else ""
        lines.append(f"| {name} | {flag} | {variable} | {default} | {setting.help} |")
    return "\n".join(lines) + "\n"


def _config_of(given: dict[str, _Given]) -> StoreConfig:
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        if setting.name in given and setting.kind not in ("share", "map"):
            values[setting.field] = _read(setting, given[setting.name])
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


def _from_flags(flags: Mapping[str, str | bool | None]) -> dict[str, _Given]:
    return {
        name: _Given(value, f"--{name.replace('_', '-')}")
        for name, value in flags.items()
        if value is not None and _known(name, where="flags")
    }


def _from_environ(environ: Mapping[str, str]) -> dict[str, _Given]:
    names = {setting.variable: setting for setting in SETTINGS if setting.variable is not None}
    given: dict[str, _Given] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable in names:
            if value:
                given[names[variable].name] = _Given(value, variable)
        elif near := difflib.get_close_matches(variable, [name for name in names if name], 1, 0.93):
            # Others are left alone: Kubernetes adds some (…_SERVICE_HOST) for a service called kvhearth-store.
            raise UserError("not a setting", where=variable, remedy=f"did you mean {near[0]}?")
    if "password" in given and "password_file" in given:
        remedy = f"unset {PREFIX}PASSWORD or {PREFIX}PASSWORD_FILE"
        raise UserError("the password is given twice", where=f"{PREFIX}PASSWORD_FILE", remedy=remedy)
    return given


def _from_yaml(path: Path) -> dict[str, _Given]:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_YAML_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}", where="--config", remedy="give a YAML file of settings"
        ) from None
    if len(text) > _MOST_YAML_BYTES:
        raise UserError("more than 1 MiB", where=str(path), remedy="give a file of settings")
    try:
        data = yaml.load(text, Loader=_OneKeyLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        what = f"not valid YAML: {error.problem or error.context}"
        raise UserError(what, where=place, remedy="correct that line") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        what = f"not valid YAML: {str(error).partition(chr(10))[0]}"
        raise UserError(what, where=str(path), remedy="give a text file in UTF-8") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"a {type(data).__name__}, not a mapping", where=str(path), remedy="write 'capacity: 64GiB'")
    for name in data:
        _known(str(name), where=str(path))
        if name == "password":
            remedy = f"put it into a file of its own and name that as password_file, or set {PREFIX}PASSWORD"
            raise UserError("a password has no place in a file of settings", where=f"{path}: password", remedy=remedy)
    return {name: _Given(value, f"{path}: {name}", path.resolve().parent) for name, value in data.items()}


def _known(name: str, *, where: str) -> bool:
    if name in _BY_NAME:
        return True
    near = difflib.get_close_matches(name.lower().replace("-", "_").removesuffix("_bytes"), _BY_NAME, 1, 0.6)
    remedy = f"did you mean {near[0]}?" if near else "see 'kvhearth store serve --help' for the settings"
    raise UserError(f"{_shown(name)} is not a setting", where=where, remedy=remedy)


def _read(setting: Setting, given: _Given) -> Any:
    value = given.value
    if setting.name == "password":  # taken as it is, and in no error
        return value
    if setting.optional and (value is None or str(value).lower() in _WORDS_FOR_NONE):
        return None
    read: Callable[[Any], Any] | None = _READERS.get(setting.kind)
    try:
        if read is not None and not isinstance(value, (dict, list)) and value is not None:
            return read(value)
        if setting.kind == "size" and isinstance(value, (str, int)) and not isinstance(value, bool):
            return parse_bytes(value, where=given.where)
        if setting.kind == "path" and isinstance(value, str):
            return (given.folder or Path()) / value
    except ValueError:
        pass
    raise UserError(f"{_shown(value)} is not {_WANTED[setting.kind]}", where=given.where, remedy=_REMEDY[setting.kind])


def _read_shares(setting: Setting, given: _Given, capacity_bytes: int) -> Any:
    if setting.kind == "share":
        return _share(given.value, given.where, capacity_bytes)
    if not isinstance(given.value, dict):
        raise UserError(f"{_shown(given.value)} is not a mapping", where=given.where, remedy="write NAMESPACE: 10GiB")
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
            raise UserError(f"{_shown(value)} is no share", where=where, remedy="write more than 0% and at most 100%")
        return max(1, int(capacity_bytes * percent / 100))
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise UserError(f"{_shown(value)} is not a size", where=where, remedy="write a size such as 10GiB, or 25%")
    return parse_bytes(value, where=where)


def _count(value: Any) -> int:
    if isinstance(value, (bool, float)):
        raise ValueError
    return int(str(value))


def _seconds(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _switch(value: Any) -> bool:
    word = str(value).lower()
    if word not in (*_YES, *_NO):
        raise ValueError
    return word in _YES


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


_READERS: dict[str, Callable[[Any], Any]] = {"count": _count, "seconds": _seconds, "switch": _switch, "text": _text}
_WANTED = {
    "size": "a size",
    "count": "a whole number",
    "seconds": "a number of seconds",
    "switch": "a yes or a no",
    "text": "text",
    "path": "a path",
}
_REMEDY = {
    "size": "write bytes or a number with a unit, such as 512MiB, 2GiB or 10GB",
    "count": "write digits only",
    "seconds": "write a number, such as 30 or 0.5",
    "switch": "write true or false",
    "text": "write a text; put it in quotes where YAML would take it for something else",
    "path": "write the path of a file or folder",
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


class _OneKeyLoader(yaml.SafeLoader):
    """YAML lets the last of two equal keys win in silence; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _settings() -> tuple[Setting, ...]:
    kinds = {"int": "count", "float": "seconds", "bool": "switch", "Mapping[str, int]": "map"}
    found: list[Setting] = []
    for field in fields(StoreConfig):
        annotation = str(field.type)
        optional = annotation.endswith("| None")
        kind = kinds.get(annotation, "path" if annotation.startswith("Path") else "text")
        if field.name.endswith("_bytes"):
            kind = "share" if field.name.endswith("quota_bytes") else "size"
        help_ = field.metadata["help"] + (f" One of {', '.join(POLICY_NAMES)}." if field.name == "policy" else "")
        found.append(
            Setting(setting_name(field.name), field.name, kind, _default_text(field.default, kind), help_, optional)
        )
        if field.name == "password":
            file_help = "File with the password that clients must AUTH with, as the user 'default' with every right."
            found.append(Setting("password_file", "password_file", "path", "none", file_help))
    return tuple(found)


def _default_text(default: Any, kind: str) -> str:
    if default is MISSING:
        return ""
    if default is None:
        return "none"
    if kind in ("size", "share"):
        return format_bytes(default).replace(" ", "") if default else "0"
    return str(default).lower() if kind == "switch" else f"{default:g}" if kind == "seconds" else str(default)


SETTINGS = _settings()
"""Every setting, in the order of the help."""
_BY_NAME = {setting.name: setting for setting in SETTINGS}
