"""Our own tokenizer: what is remembered never changes what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvhearth.errors import UserError
from kvhearth.router.tokens.local import LocalTokenizer
from kvhearth.router.tokens.shapes import Chat, Text

from .conftest import make

TALK = [{"role": "user", "content": "hello world"}, {"role": "assistant", "content": "I am nobody."}]
PIECES = st.sampled_from(["<|im_start|>", "<|im_end|>", "<s>", "hello ", "world", "\n", " ", "é", "東", "<|im", "d|>"])


@given(st.lists(PIECES, max_size=12))
def test_ids_are_those_of_the_whole_text(folder: Path, pieces: list[str]) -> None:
    text = "".join(pieces)
    local = LocalTokenizer(folder)
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for _ in range(2):  # encoded, then remembered
        assert local.encode(text, special=False) == whole.encode(text, add_special_tokens=False).ids
        assert local.encode(text, special=True) == whole.encode(text).ids


def test_a_conversation_goes_through_the_chat_template(local: LocalTokenizer) -> None:
    rendered = local.text_of(Chat(TALK))
    user, assistant = "<|im_start|>user\nhello world<|im_end|>\n", "<|im_start|>assistant\n"
    assert rendered == f"{user}{assistant}I am nobody.<|im_end|>\n{assistant}"
    assert not local.text_of(Chat(TALK, add_generation_prompt=False)).endswith("assistant\n")
    assert '"name": "f"' in local.text_of(Chat(TALK, tools=[{"type": "function", "function": {"name": "f"}}]))


def test_a_message_that_goes_on_is_left_open(local: LocalTokenizer) -> None:
    asked = Chat(TALK, continued=True)
    assert local.text_of(asked).endswith("<|im_start|>assistant\nI am nobody.")


def test_parts_of_a_message_are_lines_where_the_template_wants_a_string(local: LocalTokenizer) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    assert "user\nhello\nworld<|im_end|>" in local.text_of(Chat([{"role": "user", "content": parts}]))


def test_a_template_that_loops_over_parts_gets_parts(tmp_path: Path) -> None:
    loop = "{% for p in content %}[{{ p.text }}]{% endfor %}"
    template = "{% for m in messages %}{% set content = m.content %}" + loop + "{% endfor %}"
    local = LocalTokenizer(make(tmp_path / "parts", template))
    assert local.text_of(Chat([{"role": "user", "content": "hello"}])) == "[hello]"


def test_a_template_that_refuses_is_an_error_that_says_so(tmp_path: Path) -> None:
    local = LocalTokenizer(make(tmp_path / "refuses", "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="roles must alternate"):
        local.text_of(Chat(TALK))


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    local = LocalTokenizer(make(tmp_path / "evil", "{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(ValueError, match="unsafe"):
        local.text_of(Chat(TALK))


def test_the_next_turn_encodes_only_what_is_new(local: LocalTokenizer) -> None:
    first = local.text_of(Chat(TALK))
    local.encode(first, special=False)
    longer = local.text_of(Chat([*TALK, {"role": "user", "content": "What is the weather?"}]))
    assert 0 < local.uncached_bytes(longer) < 40


def test_memory_for_what_is_remembered_is_bounded(folder: Path) -> None:
    local = LocalTokenizer(folder, cache_bytes=2000)
    for number in range(200):
        local.encode(f"<|im_start|>{number} hello world<|im_end|>", special=False)
    assert 0 < local._cached_bytes <= 2000


def test_a_model_with_a_template_for_tools_uses_it_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    local = LocalTokenizer(make(tmp_path / "named", named))
    assert local.text_of(Chat(TALK)) == "plain"
    assert local.text_of(Chat(TALK, tools=[{"function": {"name": "f"}}])) == "with tools"


def test_a_template_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        LocalTokenizer(make(tmp_path / "broken", "{% for %}"))


@pytest.mark.parametrize("content", ["", "{}", "junk"])
def test_a_folder_without_a_tokenizer_is_a_clear_error(tmp_path: Path, content: str) -> None:
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="no tokenizer"):
        LocalTokenizer(tmp_path)


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    local = LocalTokenizer(make(tmp_path / "plain", None))
    with pytest.raises(ValueError, match="no chat template"):
        local.text_of(Chat(TALK))
    assert local.text_of(Text("a")) == "a"
