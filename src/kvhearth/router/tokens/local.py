"""The model's own tokenizer and chat template in this process. Whether it agrees with an engine is `parity`'s business.

Text is cut at special tokens, which every BPE tokenizer does first, and what lies between them is remembered: the next
turn of a conversation encodes only what is new.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvhearth.errors import UserError
from kvhearth.router.tokens.shapes import Chat, Text

_BYTES_A_TOKEN = 12
"""Memory of a remembered id: an entry of a list and a share of its integer."""

_LOOP_OVER_CONTENT = re.compile(r"for\s+\w+\s+in\s+(message\.content\b|message\[['\"]content['\"]\]|content\b)")
_STRING_TYPES = ("text", "input_text", "output_text")


class LocalTokenizer:
    """Encodes and renders as Hugging Face's tokenizers do. Thread-safe.

    Args:
        folder: with ``tokenizer.json``, and ``tokenizer_config.json`` or ``chat_template.jinja`` for chat.
        cache_bytes: memory for encoded pieces of text.

    Raises:
        UserError: there is no tokenizer in the folder, or it cannot be read.
    """

    def __init__(self, folder: Path, cache_bytes: int = 64 * 2**20) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text()) if _has_config(folder) else {}
        except Exception as error:  # the library raises bare exceptions
            raise UserError(
                f"no tokenizer in {folder}: {error}", where="tokenizer", remedy="name the folder of tokenizer.json"
            ) from None
        self._template, self._wants_parts = _template(folder, config)
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in config.items()
            if name in ("bos_token", "eos_token", "pad_token", "unk_token") and token
        }
        self._splitter, self._ids_of = _splitter(self._tokenizer)
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_bytes = 0
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()

    @property
    def has_template(self) -> bool:
        """Whether it can render conversations."""
        return self._template is not None

    def text_of(self, asked: Text | Chat) -> str:
        """What is encoded, for a conversation by the chat template.

        Raises:
            ValueError: the template refuses the conversation, or there is none.
        """
        return asked.text if isinstance(asked, Text) else self._render(asked)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text; ``special``: with what the tokenizer puts around it (its BOS, mostly)."""
        if self._splitter is None or special:
            # What is put around depends on the tokenizer's own rules; it is looked for at the ends only.
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
            return found
        ids: list[int] = []
        for at, piece in enumerate(self._splitter.split(text)):
            if at % 2:
                ids.append(self._ids_of[piece])
            elif piece:
                ids += self._piece(piece)
        return ids

    def uncached_bytes(self, text: str) -> int:
        """About how much of a text is still to be encoded."""
        if self._splitter is None:
            return len(text)
        return sum(len(piece) for piece in self._splitter.split(text)[::2] if piece not in self._cache)

    def _piece(self, piece: str) -> Sequence[int]:
        with self._lock:
            found = self._cache.get(piece)
            if found is not None:
                self._cache.move_to_end(piece)
                return found
        ids: list[int] = self._tokenizer.encode(piece, add_special_tokens=False).ids
        with self._lock:
            if piece not in self._cache:
                self._cache[piece] = ids
                self._cached_bytes += len(piece) + _BYTES_A_TOKEN * len(ids)
            while self._cached_bytes > self._cache_bytes:
                old, old_ids = self._cache.popitem(last=False)
                self._cached_bytes -= len(old) + _BYTES_A_TOKEN * len(old_ids)
        return ids

    def _render(self, asked: Chat) -> str:
        if self._template is None:
            raise ValueError("the tokenizer has no chat template")
        options = dict(asked.options)
        extra = options.pop("chat_template_kwargs", None) or {}
        continued = bool(options.pop("continue_final_message", False))
        generation = options.pop("add_generation_prompt", True)
        messages = [self._formatted(message) for message in asked.messages]
        try:
            text: str = self._template.render(
                messages=messages,
                tools=options.get("tools"),
                documents=options.get("documents"),
                add_generation_prompt=bool(generation) and not continued,
                **{**self._special, **extra},
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None
        return _cut_after(text, messages[-1].get("content")) if continued else text

    def _formatted(self, message: dict[str, Any]) -> dict[str, Any]:
        """Content as the template wants it: one string, or a list of parts."""
        content = message.get("content")
        if self._wants_parts and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list):
            texts = [str(part.get("text", "")) for part in content if part.get("type") in _STRING_TYPES]
            if self._wants_parts:
                return {**message, "content": [{"type": "text", "text": text} for text in texts]}
            return {**message, "content": "\n".join(texts)}
        return message


def _has_config(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


def _template(folder: Path, config: dict[str, Any]) -> tuple[jinja2.Template | None, bool]:
    """The chat template, and whether it takes a message's content as a list of parts."""
    source = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text()
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None, False
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = time.strftime
    try:
        return environment.from_string(source), bool(_LOOP_OVER_CONTENT.search(source))
    except jinja2.TemplateError as error:
        raise UserError(
            f"the chat template of {folder} cannot be read: {error}", where="tokenizer", remedy="check the file"
        ) from None


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _cut_after(text: str, content: Any) -> str:
    """The rendered text up to the end of the last message, which goes on."""
    last = content if isinstance(content, str) else content[-1]["text"] if content else ""
    at = text.rfind(last.strip())
    if at < 0:
        raise ValueError("the chat template drops the last message")
    ending = text[at + len(last.strip()) :]
    kept = at + len(last) if text[at : at + len(last)] == last else at + len(last.strip())
    return text[:kept] if ending else text


def _splitter(tokenizer: Tokenizer) -> tuple[re.Pattern[str] | None, dict[str, int]]:
    """What finds special tokens in a text; None where cutting there could change what is between them."""
    added = tokenizer.get_added_tokens_decoder()
    if not added or any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in added.values()):
        return None, {}
    ids = {token.content: number for number, token in added.items()}
    pattern = re.compile("(" + "|".join(re.escape(text) for text in sorted(ids, key=len, reverse=True)) + ")")
    sample = "Two words" + max(ids, key=len) + "and\n more" + min(ids, key=len)
    whole: list[int] = tokenizer.encode(sample, add_special_tokens=False).ids
    cut: list[int] = []
    for at, piece in enumerate(pattern.split(sample)):
        cut += [ids[piece]] if at % 2 else tokenizer.encode(piece, add_special_tokens=False).ids if piece else []
    return (pattern, ids) if cut == whole else (None, {})
