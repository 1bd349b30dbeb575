"""Reads from a request body what routing needs: model, content in the order the engine sees it, load. Once, unchanged.

Any shape that an engine might take is accepted; whether it is valid is for the engine to say.
"""

from __future__ import annotations

import re
from array import array
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_128_digest

from kvhearth.routing.hashing import estimate_tokens

NON_TEXT_PART_TOKENS = 1024
"""Load of an image, audio or video part, whose bytes say nothing about its tokens. Only balance depends on it."""

MAX_VALUES = 1 << 21
"""JSON values a body may have, so that reading the worst one holds up all other clients for about two seconds.
Counted by commas and opening brackets, those within texts too: twice a prompt of a million token ids."""

MAX_PARTS = 1024
"""Parts of a form that are searched for its model."""

MAX_PART_HEAD_BYTES = 4096

_BOUNDARY = re.compile(rb'boundary="?([^";,]{1,70})"?', re.IGNORECASE)
_MODEL_PART = re.compile(rb'(?:^|\r\n)content-disposition:[^\r\n]*;\s*name="?model"?\s*(?:;|\r\n|$)', re.IGNORECASE)


class Routable(NamedTuple):
    """``content`` is what the prompt hashes are taken over; ``tokens`` estimates its load."""

    model: str | None
    content: bytes
    salt: str
    tokens: int


class BadBody(Exception):
    """The body cannot be read; says what is wrong and, if one is to blame, in which parameter."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.message = message
        self.param = param
        super().__init__(message)


class _Body(msgspec.Struct):
    model: str | None = None
    cache_salt: str | None = None
    tools: Any = None
    instructions: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    query: Any = None
    documents: Any = None
    text_1: Any = None
    text_2: Any = None
    tokens: Any = None


_decode = msgspec.json.Decoder(_Body).decode


def read_body(body: bytes, content_type: bytes) -> Routable:
    """Model and content of a JSON or multipart body.

    Raises:
        BadBody: it is not JSON, not an object, has too many values, or its model is not a string.
    """
    if content_type[:19].lower() == b"multipart/form-data":
        return Routable(_multipart_model(body, content_type), b"", "", 1)
    if len(body) > MAX_VALUES and sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise BadBody(f"the body has more than {MAX_VALUES} values")
    content = _Content()
    try:
        fields = _decode(body)
        content.add_fields(fields)
    except msgspec.ValidationError as error:
        message, _, param = str(error).partition(" - at `$.")
        raise BadBody(f"{message} - at `{param}" if param else message, param.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadBody("the body is not JSON that can be read: it is nested too deeply") from None
    return Routable(fields.model, b"".join(content.pieces), fields.cache_salt or "", content.tokens())


class _Content:
    """Flattens a request's prompt into bytes: equal beginnings of conversations give equal beginnings of bytes."""

    __slots__ = ("non_text", "pieces")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.non_text = 0

    def add_fields(self, fields: _Body) -> None:
        # Chat templates put tools and instructions before the messages.
        if fields.tools:
            self.pieces.append(msgspec.json.encode(fields.tools))
        for value in (
            fields.instructions,
            fields.messages,
            fields.prompt,
            fields.input,
            fields.query,
            fields.documents,
            fields.text_1,
            fields.text_2,
            fields.tokens,
        ):
            if value is not None:
                self._add(value)

    def tokens(self) -> int:
        return estimate_tokens(sum(map(len, self.pieces))) + self.non_text * NON_TEXT_PART_TOKENS

    def _add(self, value: Any) -> None:
        if isinstance(value, str):
            self.pieces.append(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, list):
            if value and isinstance(value[0], int):
                self._add_token_ids(value)
            else:
                for item in value:
                    self._add(item)
        elif isinstance(value, dict):
            self._add_object(value)
        else:
            self.pieces.append(msgspec.json.encode(value))

    def _add_token_ids(self, ids: list[Any]) -> None:
        try:
            self.pieces.append(array("I", ids).tobytes())
        except (OverflowError, TypeError):
            self.pieces.append(msgspec.json.encode(ids))

    def _add_object(self, value: dict[str, Any]) -> None:
        """A message, or a part of one. Text counts as itself in whichever form it comes; the rest as its JSON."""
        role = value.get("role")
        if isinstance(role, str):
            self.pieces.append(b"\n<%b>\n" % role.encode("utf-8", "surrogatepass"))
        elif isinstance(value.get("text"), str):
            self._add(value["text"])
            return
        elif "type" in value and "content" not in value:
            self._add_non_text(value)
            return
        if value.get("content") is not None:
            self._add(value["content"])
        rest = {name: item for name, item in value.items() if name not in {"role", "content"}}
        if rest:
            self.pieces.append(msgspec.json.encode(rest))

    def _add_non_text(self, value: dict[str, Any]) -> None:
        # Hashed by its bytes, weighed by a constant: a digest keeps an image from counting as its length in tokens.
        self.pieces.append(xxh3_128_digest(msgspec.json.encode(value)))
        self.non_text += 1


def _multipart_model(body: bytes, content_type: bytes) -> str | None:
    """Value of the form field ``model`` (audio transcription and the like are sent as forms)."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise BadBody("multipart/form-data without a boundary")
    delimiter = b"--" + boundary[1]
    start = body.find(delimiter)
    for _ in range(MAX_PARTS):
        end_of_head = body.find(b"\r\n\r\n", start, start + MAX_PART_HEAD_BYTES)
        if start < 0 or end_of_head < 0:
            break  # behind the last part
        end = body.find(b"\r\n" + delimiter, end_of_head)  # from there on, so that no byte is looked at twice
        if _MODEL_PART.search(body[start:end_of_head] + b"\r\n"):
            return body[end_of_head + 4 : end].decode("utf-8", "replace")
        start = end
    return None
