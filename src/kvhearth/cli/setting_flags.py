"""Flags of a command, made from a table of settings: written out they would be a second list of the settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvhearth.settings import Setting, Table

_SEVERAL = ("texts", "pairs", "engines")


def signature(table: Table, panels: Mapping[str, str] | None = None) -> inspect.Signature:
    """The signature that typer reads the flags of a command off: ``config``, and one parameter for each setting.

    Args:
        table: the settings.
        panels: title of a group of settings in the help, by group; None: no groups are shown.
    """
    config = typer.Option("--config", help=f"YAML file of settings; else the environment's {table.config_variable}.")
    parameters = [_parameter("config", Annotated[Path | None, config])]
    for setting in table.settings:
        if setting.flag is not None:
            panel = None if panels is None else panels.get(setting.group)
            parameters.append(_parameter(setting.parameter, _option(setting, setting.flag, panel)))
    return inspect.Signature(parameters, return_annotation=None)


def named(table: Table, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of such a command by the names of the settings."""
    return {
        setting.name: parameters[setting.parameter] for setting in table.settings if setting.parameter in parameters
    }


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(setting: Setting, flag: str, panel: str | None) -> Any:
    default = f" Default: {setting.default}." if setting.default not in ("", "none") else ""
    shown: dict[str, Any] = {"help": setting.help + default, "show_default": False, "rich_help_panel": panel}
    if setting.kind == "switch":
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag.removeprefix('--')}", **shown)]
    if setting.kind in _SEVERAL:
        return Annotated[list[str] | None, typer.Option(flag, **shown)]
    return Annotated[str | None, typer.Option(flag, **shown)]
