"""Prefills prompts at engines, or at a router, before users ask for them: read from a file, sent once to each address.

The engine answers one token; what counts is the KV that stays behind. ``pin`` asks the connector to keep it.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import urlsplit

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked

from kvhearth.errors import UserError

LARGEST_FILE_BYTES = 16 << 20
MOST_PROMPTS = 10_000
_LONGEST_REASON = 200
_LARGEST_ANSWER_BYTES = 1 << 20


@checked(config=ConfigDict(extra="forbid"), frozen=True, kw_only=True)
class Prompt:
    """One prompt of the file: text, or a chat's messages.

    Args:
        cache_salt: of the sharing group that it is for; must be the one that the group's requests carry.
        pin: ask the connector to keep its KV.
    """

    name: str = ""
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    cache_salt: str | None = None
    pin: bool = True

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("want prompt or messages, one of the two")
        if self.prompt == "":
            raise ValueError("the prompt is empty")
        return self


@dataclass(frozen=True, slots=True)
class Target:
    """Where prompts are sent: base URL, model (None = the first that it serves), key, and the deadline of each."""

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_seconds: float = 600.0


class Warmed(NamedTuple):
    """What became of one prompt at one address. Token counts are the server's; ``cached_tokens`` is None when it does
    not say, ``error`` None when all went well."""

    name: str
    url: str
    seconds: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a YAML (or JSON) file: a list of mappings; those without a name are numbered.

    Raises:
        UserError: it cannot be read, or is not such a list; with the entry and field.
    """
    where = str(path)
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read it: {error.strerror}", where=where, remedy="give a file of prompts") from None
    if len(text) > LARGEST_FILE_BYTES:
        raise UserError(f"more than {LARGEST_FILE_BYTES >> 20} MiB", where=where, remedy="split it")
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"not valid YAML: {' '.join(str(error).split())}", where=where, remedy="correct it") from None
    if not isinstance(data, list) or not 1 <= len(data) <= MOST_PROMPTS:
        raise UserError(
            f"not a list of 1 to {MOST_PROMPTS} prompts",
            where=where,
            remedy="write entries such as: - {name: support, prompt: You are …}",
        )
    try:
        prompts = _PROMPTS.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        index, *field = first["loc"]
        place = ".".join(str(part) for part in field)
        raise UserError(
            first["msg"].removeprefix("Value error, "),
            where=f"{where}: [{index}]{'.' if place else ''}{place}",
            remedy="an entry has prompt or messages, and may have name, cache_salt and pin",
        ) from None
    return [
        prompt if prompt.name else replace(prompt, name=f"prompt {number}") for number, prompt in enumerate(prompts, 1)
    ]


_PROMPTS = TypeAdapter(list[Prompt])


def check_url(url: str) -> str:
    """The base URL without a slash at its end.

    Raises:
        UserError: not ``http://host:port``.
    """
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment or parts.username is not None:
        raise UserError(repr(url), where="--url", remedy="give http://host:port of a router or an engine")
    return url.rstrip("/").removesuffix("/v1")


def warm(
    prompts: Sequence[Prompt], targets: Iterable[Target], on_done: Callable[[Warmed], None] = lambda done: None
) -> list[Warmed]:
    """Send each prompt to each target, one after another at each, targets side by side. Failures are in the results,
    which come prompt by prompt within each target.

    Args:
        on_done: told of each as it ends, from several threads.
    """
    targets = list(targets)
    with ThreadPoolExecutor(max_workers=max(1, min(len(targets), 64))) as pool:
        return [done for each in pool.map(lambda target: _warm_one(prompts, target, on_done), targets) for done in each]


def _warm_one(prompts: Sequence[Prompt], target: Target, on_done: Callable[[Warmed], None]) -> list[Warmed]:
    results = []
    model, why = target.model, None
    if model is None:
        try:
            model = _first_model(target)
        except _FailedError as failed:
            why = str(failed)
    for prompt in prompts:
        begun = time.monotonic()
        try:
            if model is None:
                raise _FailedError(why)
            prompt_tokens, cached = _send(prompt, model, target)
            done = Warmed(prompt.name, target.url, time.monotonic() - begun, prompt_tokens, cached)
        except _FailedError as failed:
            done = Warmed(prompt.name, target.url, time.monotonic() - begun, error=str(failed))
        results.append(done)
        on_done(done)
    return results


class _FailedError(Exception):
    """A request that came to nothing."""


def _first_model(target: Target) -> str:
    try:
        return str(_call(target, "GET", "/v1/models", None)["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise _FailedError("/v1/models names no model") from None


def _send(prompt: Prompt, model: str, target: Target) -> tuple[int | None, int | None]:
    """Prefill one prompt; its tokens, and how many of them were cached already."""
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
    if prompt.pin:
        body["kv_transfer_params"] = {"kvhearth": {"pin": True}}
    if prompt.cache_salt is not None:
        body["cache_salt"] = prompt.cache_salt
    if prompt.messages is not None:
        answer = _call(target, "POST", "/v1/chat/completions", body | {"messages": prompt.messages})
    else:
        answer = _call(target, "POST", "/v1/completions", body | {"prompt": prompt.prompt})
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None, None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return usage.get("prompt_tokens"), cached


def _call(target: Target, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """One JSON exchange.

    Raises:
        _FailedError: no answer in time, another status than 200, or not JSON.
    """
    parts = urlsplit(target.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=target.timeout_seconds)
    headers = {"Content-Type": "application/json"}
    if target.api_key is not None:
        headers["Authorization"] = f"Bearer {target.api_key}"
    try:
        connection.request(method, parts.path + path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read(_LARGEST_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or error or type(error).__name__
        raise _FailedError(f"no answer at {target.url} ({reason}); start it, or give another --url") from None
    finally:
        connection.close()
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if response.status != 200:
        remedy = "; give its key with --api-key-file" if response.status == 401 else ""
        raise _FailedError(f"HTTP {response.status}: {_reason(answer, text)}{remedy}")
    if not isinstance(answer, dict):
        raise _FailedError("the answer is no JSON object")
    return answer


def _reason(answer: Any, text: bytes) -> str:
    """What a refusal says, in OpenAI's error form or its own."""
    told = answer.get("error", answer) if isinstance(answer, dict) else None
    message = told.get("message") if isinstance(told, dict) else None
    return str(message or text.decode(errors="replace"))[:_LONGEST_REASON]
