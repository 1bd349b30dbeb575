"""Reads a secret from a file of its own. The secret is in no error."""

from __future__ import annotations

from pathlib import Path

from kvhearth.errors import UserError

_MOST_BYTES = 2**16


def read_secret_file(path: Path, *, where: str) -> str:
    """The secret in a file, without the white space around it.

    Raises:
        UserError: the file cannot be read, is no text, is empty, or too long for a secret.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode()
    except OSError as error:
        remedy = "give a readable text file"
        raise UserError(f"cannot read {path}: {error.strerror}", where=where, remedy=remedy) from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text", where=where, remedy="give a text file in UTF-8") from None
    if len(data) > _MOST_BYTES:
        raise UserError(f"{path} is longer than 64 KiB", where=where, remedy="give a file with the secret alone")
    if not text.strip():
        raise UserError(f"{path} is empty", where=where, remedy="put the secret into it")
    return text.strip()
