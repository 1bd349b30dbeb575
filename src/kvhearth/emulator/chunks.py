"""The bytes of answers: streamed pieces with their fixed parts encoded once a call, and whole responses.

Shapes are vLLM's for ``/v1/completions`` and ``/v1/chat/completions``. Generated text is lowercase letters and spaces,
which JSON needs no escapes for.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvhearth.emulator.answers import Answer, Call

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class StreamEncoder:
    """Encodes the pieces of one streamed call."""

    def __init__(self, call: Call, model: str, created: int) -> None:
        chat = call.chat
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": call.call_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._chat = chat
        self._continuous_usage = call.options.continuous_usage_stats
        self._before = [self._head + self._choice_head(answer.index) for answer in call.answers]
        self._after = (
            b'"},"logprobs":null,"finish_reason":null}]'
            if chat
            else (b'","logprobs":null,"finish_reason":null,"stop_reason":null}]')
        )

    def opening(self, answer: Answer) -> bytes:
        """What comes before an answer's first token: a chat names the role."""
        if not self._chat:
            return b""
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._head + b'{"index":%d,' % answer.index + role + self._usage(answer) + b"}\n\n"

    def piece(self, answer: Answer, text: str) -> bytes:
        """Further text; with the last of it, why the answer ended."""
        after = self._after
        if answer.complete:
            reason = b'"finish_reason":"%s"' % answer.finish_reason.encode()
            after = after.replace(b'"finish_reason":null', reason)
        return self._before[answer.index] + text.encode() + after + self._usage(answer) + b"}\n\n"

    def usage(self, call: Call) -> bytes:
        """The closing piece of ``stream_options.include_usage``."""
        return self._head + b'],"usage":' + _encode(call.total_usage()) + b"}\n\n"

    def _choice_head(self, index: int) -> bytes:
        return (b'{"index":%d,"delta":{"content":"' if self._chat else b'{"index":%d,"text":"') % index

    def _usage(self, answer: Answer) -> bytes:
        return b',"usage":' + _encode(answer.usage()) if self._continuous_usage else b""


def error_event(message: str) -> bytes:
    """A failure in the middle of a stream, as vLLM reports it."""
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return b"data: " + _encode({"error": error}) + b"\n\n" + DONE


def whole(call: Call, model: str, created: int) -> bytes:
    """The body of an answer that is not streamed."""
    chat = call.chat
    return _encode(
        {
            "id": call.call_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": model,
            "choices": [_chat_choice(answer) if chat else _text_choice(answer) for answer in call.answers],
            "usage": call.total_usage(),
        }
    )


def _text_choice(answer: Answer) -> dict[str, Any]:
    return {
        "index": answer.index,
        "text": answer.text,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": None,
    }


def _chat_choice(answer: Answer) -> dict[str, Any]:
    return {
        "index": answer.index,
        "message": {"role": "assistant", "content": answer.text},
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": None,
    }
