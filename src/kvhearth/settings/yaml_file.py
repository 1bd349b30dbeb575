"""Reads a YAML file of settings: bounded, without the last of two equal keys winning in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvhearth.errors import UserError

_MOST_YAML_BYTES = 2**20


def read_yaml(path: Path) -> Any:
    """What a YAML file of at most 1 MiB holds; a key that is there twice is an error.

    Raises:
        UserError: it cannot be read, or is not YAML.
    """
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
        return yaml.load(text, Loader=_OneKeyLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        what = f"not valid YAML: {error.problem or error.context}"
        raise UserError(what, where=place, remedy="correct that line") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        what = f"not valid YAML: {str(error).partition(chr(10))[0]}"
        raise UserError(what, where=str(path), remedy="give a text file in UTF-8") from None


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
