"""Stacks as files: YAML in and out, the JSON schema, and every way a file can be wrong as one line for its author."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvhearth.errors import UserError
from kvhearth.stack.spec import Stack

_LARGEST_FILE_BYTES = 1 << 20
_LONGEST_VALUE = 60
_WORDS = {
    "Input should be": "want",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid tuple": "a list",
    "a valid dictionary": "a mapping",
}
"""Pydantic's words, and those of people who write YAML."""


def read_stack(path: str | Path) -> Stack:
    """The Stack in a YAML file; relative paths in it start from the file's directory.

    Raises:
        UserError: no such file, not YAML (with the line), or not a Stack (with field, value and remedy).
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"cannot read it: {error.strerror}", where=str(path), remedy="give the path of a Stack file"
        ) from None
    if len(text) > _LARGEST_FILE_BYTES:
        raise UserError("more than 1 MiB", where=str(path), remedy="give a Stack file; the examples have some 20 lines")
    return parse_stack(text, where=str(path), directory=path.resolve().parent)


def parse_stack(text: str | bytes, *, where: str = "stack", directory: Path | None = None) -> Stack:
    """The Stack in a YAML text.

    Args:
        text: the YAML.
        where: what errors call the text.
        directory: where relative paths in it start from; None leaves them as they are.

    Raises:
        UserError: see `read_stack`.
    """
    try:
        data = yaml.load(text, Loader=_OneKeyLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        raise UserError(
            f"not valid YAML: {error.problem or error.context}", where=place, remedy="correct that line"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"not valid YAML: {first}", where=where, remedy="give a text file in UTF-8") from None
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise UserError(f"{kind}, not a mapping", where=where, remedy="start from examples/minimal.yaml")
    return stack_of(data, where=where, directory=directory)


def stack_of(data: Mapping[str, Any], *, where: str = "stack", directory: Path | None = None) -> Stack:
    """The Stack that a mapping describes, with `parse_stack`'s errors in place of pydantic's."""
    try:
        return Stack.model_validate(dict(data), context={"directory": directory} if directory else None)
    except ValidationError as error:
        raise _readable(error, where) from None


def write_stack(stack: Stack) -> str:
    """The Stack as YAML with every field spelled out; `parse_stack` reads back an equal one."""
    return yaml.safe_dump(stack.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def stack_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a Stack file, for editors and for other forms derived from it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Stack.model_json_schema()}


class _OneKeyLoader(yaml.SafeLoader):
    """YAML lets the last of two equal keys win in silence; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key_node.value!r} twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _readable(error: ValidationError, where: str) -> UserError:
    """The first fault of a Stack as one line, with the number of others, so that it is not taken for the only one."""
    details = error.errors()
    first = details[0]
    context: Mapping[str, Any] = first.get("ctx") or {}
    path = _path(first["loc"])
    field = str(context.get("field", ""))
    path += field if field.startswith("[") or not path else f".{field}" if field else ""
    others = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return UserError(_what(first) + others, where=f"{where}: {path}" if path else where)


def _path(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _what(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "stack":
        return message
    if detail["type"] == "missing":
        return "missing; it has no default, so set it"
    if detail["type"] == "string_pattern_mismatch":
        message = "want lower case letters, digits and dashes"
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    message = message[0].lower() + message[1:] if message[1:2].islower() else message
    message = re.sub(r" or instance of \w+", "", message)
    value = detail["input"]
    if isinstance(value, dict | list) and detail["type"] == "value_error":
        return message
    if isinstance(value, dict | list):
        return f"{message}, not a {'mapping' if isinstance(value, dict) else 'list'}"
    shown = repr(value)
    return f"{shown if len(shown) <= _LONGEST_VALUE else shown[:_LONGEST_VALUE] + '…'}: {message}"
