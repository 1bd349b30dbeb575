"""Secrets come from a file or the environment, never from the command line, which all users see."""

from __future__ import annotations

import os
from pathlib import Path

from kvhearth.errors import UserError

STORE_PASSWORD_VARIABLE = "KVHEARTH_STORE_PASSWORD"  # noqa: S105 - a variable's name
ROUTER_KEY_VARIABLE = "KVHEARTH_ROUTER_API_KEY"
EMULATOR_KEY_VARIABLE = "KVHEARTH_EMULATOR_API_KEY"


def read_secret(file: Path | None, variable: str, *, option: str) -> str | None:
    """The secret in ``file`` (without white space around it), else in the environment; None when neither is given.

    Args:
        variable: name of the environment variable; an empty one counts as not given.
        option: name of the option that gave ``file``, for the error.

    Raises:
        UserError: the file cannot be read, or is empty.
    """
    if file is None:
        return os.environ.get(variable) or None
    try:
        secret = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}", where=option, remedy="give a readable text file") from None
    if not secret:
        raise UserError(f"{file} is empty", where=option, remedy="put the secret into it")
    return secret
