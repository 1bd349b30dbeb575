"""Whatever a client asks, the text that we encode is the text that vLLM encodes: its own request classes, parser of
messages and chat templating beside ours, over every API and several kinds of template.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.renderers import hf, merge_kwargs
from vllm.renderers.chat_utils import parse_chat_messages

from kvhearth.router.tokens.local import LocalTokenizer
from kvhearth.router.tokens.shapes import CHAT, Chat, asked_of

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

_HEAD = "{% if tools %}<tools>{{ tools | tojson }}{% elif tools is not none %}<no tools>{% endif %}{{ documents }}"
_MESSAGE = (
    "<{{ message['role'] }} {{ message.name }}>{% if message.reasoning_content %}({{ message.reasoning_content }})"
    "{% endif %}{{ message.foo }}CONTENT{{ message.tool_calls | tojson if message.tool_calls is defined }}"
)
_TAIL = "{% if add_generation_prompt %}<assistant {{ enable_thinking }} {{ reasoning_effort }}>{% endif %}"
_PARTS = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for c in message.content %}"
    "[{{ c.text }} {{ c.cache_control }}]{% endfor %}{% endif %}"
)


def _template(content: str) -> str:
    return _HEAD + "{% for message in messages %}" + _MESSAGE.replace("CONTENT", content) + "{% endfor %}" + _TAIL


TEMPLATES = {
    "text": _template("{{ message['content'] }}"),
    "trimmed": _template("{{ message.content | trim }}"),
    "parts": _template(_PARTS),
    "filtered": _template(
        "{% for c in message['content'] | selectattr('type', 'equalto', 'text') %}({{ c.text }}){% endfor %}"
    ),
    "generation": _template("{% generation %}{{ message.content }}{% endgeneration %}"),
    "developer": _template("{% if message.role == 'developer' %}!{% endif %}{{ message.content }}"),
}

USER = {"role": "user", "content": "hello world"}
SAID = {"role": "assistant", "content": "I am nobody."}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "ok"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
BARE_TOOL = {"function": {"strict": True, "name": "f", "x": 1}, "type": "function"}
ON = {"continue_final_message": True, "add_generation_prompt": False}
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "ok"}
TOOLS_OF_ANTHROPIC = [
    {"name": "f", "description": "d", "input_schema": {"properties": {}}, "strict": True},
    {"name": "g", "input_schema": {"type": "object"}},
]


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER, SAID, USER]},
    "tool": {"messages": [USER], "tools": [TOOL]},
    "bare tool": {"messages": [USER], "tools": [BARE_TOOL]},
    "tools but no choice": {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    "effort": {"messages": [USER], "reasoning_effort": "high"},
    "no effort": {"messages": [USER], "reasoning_effort": "none"},
    "variables": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "developer": {"messages": [{"role": "developer", "content": "be brief"}, USER]},
    "late developer": {
        "messages": [{"role": "system", "content": "s"}, USER, {"role": "developer", "content": "d"}, USER]
    },
    "calls": {"messages": [USER, call('{"a":1}'), RESULT]},
    "call with junk": {"messages": [USER, call("junk"), RESULT]},
    "call with a list": {"messages": [USER, call("[1]"), RESULT]},
    "no calls": {"messages": [USER, {**SAID, "tool_calls": []}, USER]},
    "reasoning": {"messages": [USER, {**SAID, "reasoning": "hmm"}, USER]},
    "reasoning_content": {"messages": [USER, {**SAID, "reasoning_content": "hmm"}, USER]},
    "name and more": {"messages": [{**USER, "foo": "x", "name": "Ann"}]},
    "result in parts": {"messages": [USER, call("{}"), {**RESULT, "content": [text("a"), text("b")]}]},
    "refusal": {"messages": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER]},
    "cache control": {"messages": [{"role": "user", "content": [text("a", cache_control={"type": "ephemeral"})]}]},
    "billing": {"messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nbe brief"}, USER]},
    "continued": {"messages": [USER, SAID], **ON},
    "continued after spaces": {"messages": [USER, {**SAID, "content": "I am  "}], **ON},
    "continued parts": {"messages": [USER, {**SAID, "content": [text("a"), text("b ")]}], **ON},
    "continued from nothing": {"messages": [USER, {**SAID, "content": ""}], **ON},
    "no prompt": {"messages": [USER, SAID], "add_generation_prompt": False},
    "special": {"messages": [USER], "add_special_tokens": True},
    "documents": {"messages": [USER], "documents": [{"title": "t", "text": "x"}]},
}
ANSWERED = {
    "role": "assistant",
    "content": [{"type": "output_text", "text": one, "annotations": []} for one in "ab"],
    "type": "message",
    "id": "m1",
    "status": "completed",
}
RESPONSE_BODIES: dict[str, dict[str, Any]] = {
    "text": {"input": "hello"},
    "instructions": {"input": [USER, SAID, USER], "instructions": "be brief"},
    "reasoning": {"input": "hello", "reasoning": {"effort": "low"}},
    "variables": {"input": "hello", "chat_template_kwargs": {"enable_thinking": False}},
    "answer in parts": {"input": [USER, ANSWERED, USER]},
    "two answers": {"input": [USER, SAID, SAID, USER]},
    "empty instructions": {"input": "hello", "instructions": ""},
}
ANTHROPIC_BODIES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER, SAID, USER], "system": "be brief"},
    "blocks": {"system": [text("a"), text("b")], "messages": [{"role": "user", "content": [text("x"), text("y")]}]},
    "billing": {"system": [text("x-anthropic-billing-header: cch=1"), text("b")], "messages": [USER]},
    "no thinking": {"thinking": {"type": "disabled"}, "messages": [USER]},
    "variables": {"chat_template_kwargs": {"enable_thinking": False}, "messages": [USER]},
    "effort": {"output_config": {"effort": "high"}, "messages": [USER]},
    "tools": {
        "tools": TOOLS_OF_ANTHROPIC,
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("so"), TOOL_USE],
            },
            {"role": "user", "content": [TOOL_RESULT, text("go on")]},
        ],
    },
    "tools only": {
        "tools": TOOLS_OF_ANTHROPIC,
        "messages": [
            USER,
            {"role": "assistant", "content": [TOOL_USE]},
            {"role": "user", "content": [{**TOOL_RESULT, "content": [text("a"), text("b")]}]},
        ],
    },
    "redacted": {
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("y")]},
            USER,
        ]
    },
}
BODIES = [
    pytest.param(path, body, id=f"{path}: {name}")
    for path, bodies in ((CHAT, CHATS), (RESPONSES, RESPONSE_BODIES), (MESSAGES, ANTHROPIC_BODIES))
    for name, body in bodies.items()
]


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATES[request.param], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def ours(folder: Path) -> LocalTokenizer:
    return LocalTokenizer(folder)


def _model() -> Any:
    """What vLLM's parser and templating want to know of a model."""
    revisions = {"tokenizer_revision": None, "code_revision": None, "revision": None}
    kind = SimpleNamespace(model_type="llama")
    return SimpleNamespace(
        multimodal_config=None,
        enable_prompt_embeds=False,
        tokenizer="t",
        model="m",
        trust_remote_code=False,
        max_model_len=8192,
        hf_config=kind,
        hf_text_config=kind,
        **revisions,
    )


def _text_by_vllm(path: str, body: dict[str, Any], tokenizer: Any) -> tuple[str, bool]:
    """What vLLM encodes, and whether with special tokens."""
    body = {"model": "m", **copy.deepcopy(body)}
    special = False
    if path == RESPONSES:
        request = ResponsesRequest(**body)
        tools = construct_tool_dicts(request.tools, request.tool_choice)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    else:
        if path == MESSAGES:
            asked = AnthropicMessagesRequest(**body, max_tokens=5)
            request = AnthropicServingMessages.to_chat_completion_request(asked)
        else:
            request = ChatCompletionRequest(**body)
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        messages, special = request.messages, request.add_special_tokens
    defaults = merge_kwargs({}, {"tools": tools, "tokenize": False})
    given = request.build_chat_params(None, "auto").with_defaults(defaults).get_apply_chat_template_kwargs()
    form = hf.resolve_chat_template_content_format(None, tools, "auto", tokenizer, model_config=_model())
    talk, _, _ = parse_chat_messages(messages, _model(), content_format=form)
    return hf.safe_apply_chat_template(_model(), tokenizer, talk, **given), special


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_we_encode_what_vllm_encodes(path: str, body: dict[str, Any], ours: LocalTokenizer, theirs: Any) -> None:
    asked = asked_of(path, copy.deepcopy(body))
    assert isinstance(asked, Chat)
    assert (ours.text_of(asked), asked.special) == _text_by_vllm(path, body, theirs)
