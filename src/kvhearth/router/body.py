"""Reads from a request body what routing needs: model, content in the order the engine sees it, load. Once, unchanged.

Any shape that an engine might take is accepted; whether it is valid is for the engine to say.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

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

_T = TypeVar("_T")

_BOUNDARY = re.compile(rb'boundary="?([^";,]{1,70})"?', re.IGNORECASE)
_MODEL_PART = re.compile(rb'(?:^|\r\n)content-disposition:[^\r\n]*;\s*name="?model"?\s*(?:;|\r\n|$)', re.IGNORECASE)


class Routable(NamedTuple):
    """``content``, joined of ``pieces``, is what the prompt hashes are taken over; ``tokens`` estimates its load.

    ``session`` is what the body says keeps requests together (``prompt_cache_key``, else ``user``), "" for nothing.
    """

    model: str | None
    pieces: Sequence[bytes]
    salt: str
    tokens: int
    session: str = ""

    @property
    def content(self) -> bytes:
        """Equal beginnings of conversations have equal beginnings here."""
        return b"".join(self.pieces)


class BadBody(Exception):
    """The body cannot be read; says what is wrong and, if one is to blame, in which parameter."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.message = message
        self.param = param
        super().__init__(message)


class _Body(msgspec.Struct):
    model: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: Any = None
    user: Any = None
    tools: Any = None
    system: Any = None
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
_decode_all = msgspec.json.Decoder(dict[str, Any]).decode
_decode_top = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_NAMES = _Body.__struct_fields__


def read_body(body: bytes, content_type: bytes) -> Routable:
    """Model and content of a JSON or multipart body.

    Raises:
        BadBody: it is not JSON, not an object, has too many values, or its model is not a string.
    """
    if is_form(content_type):
        return read_form(body, content_type)
    return _read(body, _decode_routable)


def read_fields(body: bytes) -> dict[str, Any]:
    """All fields of a JSON body, for whoever needs more of it than routing by its text does; raises as `read_body`."""
    return _read(body, _decode_all)


def routable_of(fields: dict[str, Any]) -> Routable:
    """What `read_body` would have made of the body that `read_fields` read; raises as it does."""
    known = _Body(**{name: fields[name] for name in _NAMES if name in fields})
    for name in ("model", "cache_salt"):
        value = getattr(known, name)
        if value is not None and not isinstance(value, str):
            raise BadBody(f"Expected `str | null` - at `{name}`", name)
    try:
        return _routable(known)
    except RecursionError:
        raise BadBody(_TOO_DEEP) from None


def session_of(fields: dict[str, Any]) -> str:
    """As `Routable.session`."""
    key, user = fields.get("prompt_cache_key"), fields.get("user")
    if isinstance(key, str) and key:
        return key
    return user if isinstance(user, str) else ""


def is_form(content_type: bytes) -> bool:
    """Whether the body is a form, of which only the model is read."""
    return content_type[:19].lower() == b"multipart/form-data"


def read_form(body: bytes, content_type: bytes) -> Routable:
    """Model of a multipart form; raises BadBody when it has no boundary."""
    span = _multipart_model(body, content_type)
    return Routable(None if span is None else body[slice(*span)].decode("utf-8", "replace"), (), "", 1)


def with_model(body: bytes, content_type: bytes, model: str) -> bytes:
    """The body (one that was read before) with another model; all other values stay as they were, byte for byte.

    Raises:
        BadBody: what was passed over before cannot be read.
    """
    if is_form(content_type):
        span = _multipart_model(body, content_type)
        return body if span is None else body[: span[0]] + model.encode() + body[span[1] :]
    top = read_top(body)
    top["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(top)


def read_top(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, their values as they are written; raises as `read_body` does."""
    return _read(body, _decode_top)


_TOO_DEEP = "the body is not JSON that can be read: it is nested too deeply"


def _read(body: bytes, read: Callable[[bytes], _T]) -> _T:
    if len(body) > MAX_VALUES and sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise BadBody(f"the body has more than {MAX_VALUES} values")
    try:
        return read(body)
    except msgspec.ValidationError as error:
        message, _, param = str(error).partition(" - at `$.")
        raise BadBody(f"{message} - at `{param}" if param else message, param.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadBody(_TOO_DEEP) from None


def _decode_routable(body: bytes) -> Routable:
    return _routable(_decode(body))


def _routable(fields: _Body) -> Routable:
    content = _Content()
    content.add_fields(fields)
    key, user = fields.prompt_cache_key, fields.user
    session = key if isinstance(key, str) and key else user if isinstance(user, str) else ""
    return Routable(fields.model, content.pieces, fields.cache_salt or "", content.tokens(), session)


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
            fields.system,
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


def _multipart_model(body: bytes, content_type: bytes) -> tuple[int, int] | None:
    """Where the value of the form field ``model`` begins and ends (audio transcription and the like are forms)."""
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
            return end_of_head + 4, end if end >= 0 else len(body)
        start = end
    return None
