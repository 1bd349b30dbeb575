"""What the Stack's sections share: field types for sizes, names and addresses, and their base. No sockets, no files."""

from __future__ import annotations

import difflib
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvhearth.errors import UserError
from kvhearth.units import format_bytes, parse_bytes

UNIX_PATH_LIMIT = 99
"""Longest path of a unix socket in bytes: ``sun_path`` is 108 with its closing zero (unix(7)), and the store first
binds under a temporary name, which is longer by a dot and its process id."""


def wrong(field: str, what: str, remedy: str = "") -> PydanticCustomError:
    """A cross-field error: ``field`` is the path from the section that is being validated to the value at fault."""
    line = f"{what}; {remedy}" if remedy else what
    return PydanticCustomError("stack", "{line}", {"line": line, "field": field})


class Section(BaseModel):
    """A mapping in a Stack: immutable, and every key is known."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    known = sorted(cls.model_fields)
                    near = difflib.get_close_matches(str(key), known, n=1)
                    remedy = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
                    raise wrong(str(key), "unknown key", remedy)
        return data


class Address(NamedTuple):
    """A TCP address to listen at. ``port`` 0 means: pick a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.host).is_loopback


def parse_address(text: str) -> Address:
    """Read ``host:port`` (``[::1]:8000`` for IPv6); the host is an IP address, or ``localhost`` for 127.0.0.1.

    Raises:
        ValueError: not of that form, naming what is wrong.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("want host:port with a port of 0 to 65535, such as 127.0.0.1:8000 (port 0 picks a free one)")
    host = host.removeprefix("[").removesuffix("]")
    try:
        return Address(str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)), int(port))
    except ValueError:
        raise ValueError(f"host {host!r} is neither an IP address nor localhost") from None


def _bytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("want a size such as 4GiB, or a whole number of bytes")
    try:
        return parse_bytes(value)
    except UserError as error:
        raise ValueError(error.remedy or error.what) from None


def _shortest(value: int) -> int | str:
    """The form of a size for people, if it reads back as the same number of bytes."""
    text = format_bytes(value).replace(" ", "")
    try:
        return text if parse_bytes(text) == value else value
    except UserError:
        return value


Bytes = Annotated[
    int,
    BeforeValidator(_bytes),
    PlainSerializer(_shortest),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}], "examples": ["4GiB"]}),
]
"""A size in bytes; written as ``4GiB``, ``512MB`` or a whole number."""


def _listen(text: str) -> str:
    return str(parse_address(text))


def _listen_locally(text: str) -> str:
    address = parse_address(text)
    if not address.is_loopback:
        raise ValueError(
            "reachable from other machines, and the stack's own store serves this one; listen at 127.0.0.1, "
            "or run `kvhearth store serve` with a password and put its address into the printed command"
        )
    return str(address)


Listen = Annotated[str, AfterValidator(_listen)]
"""A ``host:port`` to listen at."""

LocalListen = Annotated[str, AfterValidator(_listen_locally)]
"""A ``host:port`` on loopback to listen at."""


def from_directory(path: str, context: dict[str, Any] | None) -> str:
    """A path in a Stack, relative to the file that it stands in when there is one (``context["directory"]``)."""
    directory = (context or {}).get("directory")
    return str((Path(directory) / path).resolve()) if directory else path


def _socket_path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("want an absolute path")
    if len(text.encode()) > UNIX_PATH_LIMIT:
        raise ValueError(f"{len(text.encode())} bytes long; a unix socket's path has at most {UNIX_PATH_LIMIT}")
    return text


SocketPath = Annotated[str, AfterValidator(_socket_path)]
"""Where a unix socket goes."""


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("want a power of two, such as 16")
    return value


PowerOfTwo = Annotated[int, AfterValidator(_power_of_two)]

NAME_LENGTH = 40
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=NAME_LENGTH)]
"""A name that is also a DNS label: lower case letters, digits and dashes."""


def slug(text: str) -> str:
    """The nearest `Name` to a text (``Llama-3.1-8B`` → ``llama-3-1-8b``); ``pool`` when nothing is left of it."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:NAME_LENGTH].strip("-") or "pool"
