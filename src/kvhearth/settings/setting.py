"""One setting of a server, and a value that was given for one. No table of them, and no reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One setting, as the command line, the YAML file and the reference page present it."""

    name: str
    """In the YAML file; in a group of settings ``group.name``."""
    kind: str
    """One of size, count, number, seconds, switch, text, path, texts, pairs; or one that the server reads itself."""
    default: str
    help: str
    optional: bool = True
    """Whether 'none' may be said."""
    flag: str | None = None
    """On the command line; None where it cannot be given there."""
    variable: str | None = None
    """In the environment; None where it cannot be given there."""
    secret: bool = False
    """Not for the YAML file, nor for a flag. The setting of its name with ``_file`` says the same."""
    instead: str = ""
    """What the YAML file says in its place; "" where the file may have it."""
    field: str = ""
    """Of the server's configuration, where it has another name there."""

    @property
    def group(self) -> str:
        """The mapping of the YAML file that it is in; "" for the file itself."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """Its name within its group."""
        return self.name.rpartition(".")[2]

    @property
    def parameter(self) -> str:
        """Its name as a parameter of a function."""
        return self.name.replace(".", "_")

    @property
    def in_yaml(self) -> bool:
        """Whether the YAML file may have it; a secret has no place there."""
        return not self.secret and not self.instead


class Given(NamedTuple):
    """A value as it was found."""

    value: Any
    where: str
    """What errors call its place: a flag, a variable, or file and key."""
    folder: Path | None = None
    """Where a relative path starts from; None: the working directory."""
