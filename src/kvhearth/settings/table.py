"""The table of a server's settings: finds what is given of them, and names what is no setting. Reads no values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvhearth.errors import UserError
from kvhearth.settings.setting import Given, Setting
from kvhearth.settings.values import shown
from kvhearth.settings.yaml_file import read_yaml

_NEAR, _NEAR_VARIABLE = 0.6, 0.93


class Table:
    """Every setting of one server, and how to find what is given of them.

    Args:
        settings: in the order of the help.
        prefix: of the variables in the environment; ``<prefix>CONFIG`` names the YAML file.
        command: whose ``--help`` lists the settings.
        example: a line that a YAML file may have.
    """

    def __init__(self, settings: Iterable[Setting], *, prefix: str, command: str, example: str) -> None:
        self.settings = tuple(settings)
        self.by_name = {setting.name: setting for setting in self.settings}
        self.config_variable = f"{prefix}CONFIG"
        self._prefix = prefix
        self._command = command
        self._example = example
        self._groups = {setting.group for setting in self.settings} - {""}
        self._variables = {setting.variable: setting for setting in self.settings if setting.variable is not None}

    def file(self, environ: Mapping[str, str], config_file: Path | None) -> Path | None:
        """The YAML file: ``config_file``, else the one that the environment names, if any."""
        if config_file is None and environ.get(self.config_variable):
            return Path(environ[self.config_variable])
        return config_file

    def layers(
        self, flags: Mapping[str, Any], environ: Mapping[str, str], config_file: Path | None
    ) -> list[dict[str, Given]]:
        """What is given, by setting's name, as file, environment and flags: a later one wins.

        Args:
            flags: by setting's name, as text, bool or a list of texts; None: not given.
            environ: the process's environment.
            config_file: see `file`.

        Raises:
            UserError: a name that is no setting, or one that has no place where it was found.
        """
        path = self.file(environ, config_file)
        return [
            self._from_yaml(path) if path is not None else {},
            self._from_environ(environ),
            self._from_flags(flags),
        ]

    def merged(self, layers: Iterable[Mapping[str, Given]]) -> dict[str, Given]:
        """One mapping of several, of which a later one wins."""
        given: dict[str, Given] = {}
        for layer in layers:
            for secret, file in self._secrets():
                if layer.keys() & {secret, file}:  # one way to say a secret takes the other's place
                    given = {name: value for name, value in given.items() if name not in (secret, file)}
            given |= layer
        return given

    def _secrets(self) -> list[tuple[str, str]]:
        return [(setting.name, f"{setting.name}_file") for setting in self.settings if setting.secret]

    def _from_flags(self, flags: Mapping[str, Any]) -> dict[str, Given]:
        given = {name: value for name, value in flags.items() if value is not None and value != []}
        for name in given:
            if name not in self.by_name:
                raise self._unknown(name, "flags")
        return {name: Given(value, self.by_name[name].flag or name) for name, value in given.items()}

    def _from_environ(self, environ: Mapping[str, str]) -> dict[str, Given]:
        given: dict[str, Given] = {}
        for variable, value in environ.items():
            if variable in self._variables:
                if value:
                    given[self._variables[variable].name] = Given(value, variable)
            elif not variable.startswith(self._prefix) or variable == self.config_variable:
                continue
            elif near := difflib.get_close_matches(variable, self._variables, 1, _NEAR_VARIABLE):
                # Others are left alone: Kubernetes adds some (…_SERVICE_HOST) for a service called like the server.
                raise UserError("not a setting", where=variable, remedy=f"did you mean {near[0]}?")
        for secret, file in self._secrets():
            if secret in given and file in given:
                remedy = f"unset {given[secret].where} or {given[file].where}"
                raise UserError(f"the {_noun(secret)} is given twice", where=given[file].where, remedy=remedy)
        return given

    def _from_yaml(self, path: Path) -> dict[str, Given]:
        data = read_yaml(path)
        if data is None:
            return {}
        if not isinstance(data, dict):
            raise UserError(f"a {type(data).__name__}, not a mapping", where=str(path), remedy=f"write {self._example}")
        folder = path.absolute().parent  # of a link, not of what it leads to: Kubernetes renames that folder
        given: dict[str, Given] = {}
        for name, value in data.items():
            if name not in self._groups:
                self._check_in_yaml(str(name), path)
                given[name] = Given(value, f"{path}: {name}", folder)
                continue
            if value is not None and not isinstance(value, dict):
                remedy = f"write its settings below {name}, indented"
                raise UserError(f"{shown(value)} is not a mapping", where=f"{path}: {name}", remedy=remedy)
            for key, inner in (value or {}).items():
                self._check_in_yaml(str(key), path, name)
                given[f"{name}.{key}"] = Given(inner, f"{path}: {name}.{key}", folder)
        return given

    def _check_in_yaml(self, key: str, path: Path, group: str = "") -> None:
        name = f"{group}.{key}" if group else key
        if name not in self.by_name or (not group and self.by_name[name].group):
            raise self._unknown(key, f"{path}: {group}" if group else str(path), group)
        setting = self.by_name[name]
        if setting.secret:
            remedy = f"put it into a file of its own and name that as {setting.key}_file, or set {setting.variable}"
            what = f"{_with_article(_noun(name))} has no place in a file of settings"
            raise UserError(what, where=f"{path}: {name}", remedy=remedy)
        if setting.instead:
            raise UserError("not a setting of a file", where=f"{path}: {name}", remedy=f"write {setting.instead}")

    def _unknown(self, key: str, where: str, group: str = "") -> UserError:
        remedy = f"see '{self._command} --help' for the settings"
        names = {_plain(known): known for known in self._names(group)}
        if near := difflib.get_close_matches(_plain(key.lower().replace("-", "_")), names, 1, _NEAR):
            remedy = f"did you mean {names[near[0]]}?"
        if not group and key.partition(".")[0] in self._groups:
            remedy = f"write {key.partition('.')[2]} below {key.partition('.')[0]}, indented"
        return UserError(f"{shown(key)} is not a setting", where=where, remedy=remedy)

    def _names(self, group: str) -> list[str]:
        """What may be written in a group, else by its full name elsewhere."""
        here = [setting.key for setting in self.settings if setting.group == group and setting.in_yaml]
        if group:
            return here
        return [setting.name for setting in self.settings if setting.in_yaml and setting.group] + here + [*self._groups]


def markdown_table(settings: Iterable[Setting]) -> str:
    """Settings as a table, for a reference page."""
    lines = ["| setting | flag | environment | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for setting in settings:
        flag, variable = (f"`{place}`" if place else "" for place in (setting.flag, setting.variable))
        name = f"`{setting.name}`" if setting.in_yaml else ""
        default = f"`{setting.default}`" if setting.default else ""
        lines.append(f"| {name} | {flag} | {variable} | {default} | {setting.help} |")
    return "\n".join(lines) + "\n"


def _plain(name: str) -> str:
    """A name as spelling mistakes are measured on it."""
    return name.rpartition(".")[2].removesuffix("_bytes")


def _noun(name: str) -> str:
    return name.rpartition(".")[2].replace("_", " ")


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
