"""The model's own tokenizer in this process. Whether it agrees with an engine is `parity`'s business.

Text is cut at special tokens, which every BPE tokenizer does first, and what lies between them is remembered: the next
turn of a conversation encodes only what is new.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from kvhearth.errors import UserError
from kvhearth.router.tokens.chat import conversation, tool_schemas
from kvhearth.router.tokens.shapes import Chat, Text
from kvhearth.router.tokens.template import Template

_BYTES_A_TOKEN = 12
"""Memory of a remembered id: an entry of a list and a share of its integer."""

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class LocalTokenizer:
    """Encodes and renders as Hugging Face's tokenizers do. Thread-safe.

    Args:
        folder: with ``tokenizer.json``, and ``tokenizer_config.json`` or ``chat_template.jinja`` for chat.
        cache_bytes: memory for encoded pieces of text.

    Raises:
        UserError: there is no tokenizer in the folder, or it or its chat template cannot be read.
    """

    def __init__(self, folder: Path, cache_bytes: int = 64 * 2**20) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            path = folder / "tokenizer_config.json"
            config = json.loads(path.read_text()) if path.is_file() else {}
        except Exception as error:  # the library raises bare exceptions
            raise UserError(
                f"no tokenizer in {folder}: {error}", where="tokenizer", remedy="name the folder of tokenizer.json"
            ) from None
        self._templates = _templates(folder, config)
        self._splitter, self._ids_of = _splitter(self._tokenizer)
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_bytes = 0
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()

    def text_of(self, asked: Text | Chat) -> str:
        """What is encoded, for a conversation by the chat template.

        Raises:
            ValueError: the template refuses the conversation, or there is none.
        """
        if isinstance(asked, Text):
            return asked.text
        name = "tool_use" if asked.tools is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise ValueError("the tokenizer has no chat template")
        try:
            messages = conversation(
                asked.messages, as_parts=template.takes_parts, knows_developer=template.knows_developer
            )
            return template.render(
                messages,
                tool_schemas(asked.tools),
                asked.options,
                add_generation_prompt=asked.add_generation_prompt and not asked.continued,
                continued=asked.continued,
            )
        except RecursionError:
            raise ValueError("the conversation is nested too deeply") from None

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


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, Template]:
    """By name: ``default``, and ``tool_use`` where a model has one of its own for that."""
    source = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text()
    named = source if isinstance(source, list) else [{"name": "default", "template": source}] if source else []
    special: dict[str, Any] = {
        f"{name}_token": token["content"] if isinstance(token, dict) else token
        for name in _SPECIAL
        if (token := config.get(f"{name}_token"))
    }
    try:
        return {str(one["name"]): Template(str(one["template"]), special) for one in named}
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise UserError(
            f"the chat template of {folder} cannot be read: {error}", where="tokenizer", remedy="check the file"
        ) from None


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
