"""Turns what was given for a setting into its value; a value that is not of its kind is named with its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvhearth.errors import UserError
from kvhearth.settings.setting import Given, Setting
from kvhearth.units import format_bytes, parse_bytes

_LONGEST_SHOWN = 60
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WORDS_FOR_NONE = ("", "none")


def read(setting: Setting, given: Given) -> Any:
    """The value of a setting, from text or from YAML.

    Raises:
        UserError: it is not of the setting's kind.
    """
    value = given.value
    if setting.secret:  # taken as it is, and in no error
        return value
    if setting.optional and (value is None or str(value).lower() in _WORDS_FOR_NONE):
        return None
    reader: Callable[[Any], Any] | None = _READERS.get(setting.kind)
    try:
        if setting.kind in ("texts", "pairs"):
            return read_texts(given) if setting.kind == "texts" else read_pairs(given)
        if reader is not None and not isinstance(value, (dict, list)) and value is not None:
            return reader(value)
        if setting.kind == "size" and isinstance(value, (str, int)) and not isinstance(value, bool):
            return parse_bytes(value, where=given.where)
        if setting.kind == "path" and isinstance(value, str):
            return (given.folder or Path()) / value
    except ValueError:
        pass
    raise UserError(f"{shown(value)} is not {_WANTED[setting.kind]}", where=given.where, remedy=_REMEDY[setting.kind])


def read_texts(given: Given) -> list[str]:
    """Several texts: a list, or in the environment one text with commas.

    Raises:
        UserError: it is something else.
    """
    value = given.value
    if isinstance(value, str):
        return [part for part in (part.strip() for part in value.split(",")) if part]
    if isinstance(value, Sequence) and all(isinstance(part, str) for part in value):
        return list(value)
    raise UserError(f"{shown(value)} is not {_WANTED['texts']}", where=given.where, remedy=_REMEDY["texts"])


def read_pairs(given: Given, form: str = "name=value") -> dict[str, str]:
    """Names with a value each: a mapping, or texts ``name=value``.

    Args:
        given: what was found.
        form: how such a text looks, for the error.

    Raises:
        UserError: it is something else, or has a name twice.
    """
    value = given.value
    if isinstance(value, Mapping):
        for pair in value.items():
            if not all(isinstance(part, str) and part for part in pair):
                what = f"{shown(pair[0])}: {shown(pair[1])} is not a name and a text"
                raise UserError(what, where=given.where, remedy="put both in quotes")
        return dict(value)
    pairs: dict[str, str] = {}
    for text in read_texts(given):
        name, equals, part = text.partition("=")
        if not equals or not name or not part:
            raise UserError(f"{text!r} is not {form}", where=given.where, remedy=f"give {form}")
        if name in pairs:
            raise UserError(f"{name!r} is there twice", where=given.where, remedy="give it once")
        pairs[name] = part
    return pairs


def default_text(default: Any, kind: str) -> str:
    """A default as the help and the reference page show it."""
    if default is None:
        return "none"
    if kind in ("size", "share"):
        return format_bytes(default).replace(" ", "") if default else "0"
    return str(default).lower() if kind == "switch" else f"{default:g}" if kind == "seconds" else str(default)


def shown(value: Any) -> str:
    """A value for an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _count(value: Any) -> int:
    if isinstance(value, (bool, float)):
        raise ValueError
    return int(str(value))


def _number(value: Any) -> float:
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


_READERS: dict[str, Callable[[Any], Any]] = {
    "count": _count,
    "number": _number,
    "seconds": _number,
    "switch": _switch,
    "text": _text,
}
_WANTED = {
    "size": "a size",
    "count": "a whole number",
    "number": "a number",
    "seconds": "a number of seconds",
    "switch": "a yes or a no",
    "text": "text",
    "path": "a path",
    "texts": "a list of texts",
    "pairs": "a mapping of names to texts",
}
_REMEDY = {
    "size": "write bytes or a number with a unit, such as 512MiB, 2GiB or 10GB",
    "count": "write digits only",
    "number": "write a number, such as 0.5",
    "seconds": "write a number, such as 30 or 0.5",
    "switch": "write true or false",
    "text": "write a text; put it in quotes where YAML would take it for something else",
    "path": "write the path of a file or folder",
    "texts": "write [A, B]; put each in quotes where YAML would take it for something else",
    "pairs": "write {NAME: TEXT}",
}
