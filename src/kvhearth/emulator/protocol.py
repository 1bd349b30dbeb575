"""Bodies of the OpenAI and vLLM endpoints → what the engine must do, and refusals in OpenAI's error form.

Sampling parameters (temperature, top_p, seed, penalties) are accepted and have no bearing: the emulated model's words
follow from the prompt alone. What would change the shape of an answer and is not emulated is refused by name. A chat
that names no ``max_tokens`` gets an answer of a length drawn from its prompt, unless ``ignore_eos``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from kvhearth.emulator.vllm_hashes import Adapter
from kvhearth.engine.tokens import VOCAB_SIZE, encode, prompt_seed

LONGEST_AWAIT_SECONDS = 60.0
"""A promise of chunks that is longer is ignored, as the connector does."""

MAX_PROMPTS = 128
_DEFAULT_COMPLETION_TOKENS = 16
_NATURAL_TOKENS = (32, 512)
_FIELD = re.compile(r" - at `\$\.?([A-Za-z_]*)")


class ApiError(Exception):
    """A refusal: HTTP status, message, and the field at fault, as vLLM reports them."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class StreamOptions(msgspec.Struct):
    """``stream_options``, with vLLM's addition."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(msgspec.Struct):
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    kv_transfer_params: Any = None
    n: int | None = None
    best_of: int | None = None
    stop: Any = None
    stop_token_ids: Any = None
    bad_words: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    echo: bool | None = None
    suffix: Any = None
    use_beam_search: bool = False
    truncate_prompt_tokens: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    tools: Any = None
    functions: Any = None
    prompt_embeds: Any = None


class _CompletionBody(_Body):
    prompt: str | list[str | int | list[int]] | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _ChatBody(_Body):
    messages: list[_Message] = msgspec.field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_completion_tokens: int | None = None


class _TokenizeBody(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # there are none
    return_token_strs: bool | None = None
    tools: Any = None


class _DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and the answer it gets: ``output_tokens`` of them, ended by the length limit or of itself."""

    token_ids: list[int]
    seed: int
    output_tokens: int
    finish_reason: str

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids) + self.output_tokens


@dataclass(frozen=True, slots=True)
class Generation:
    """One call to a generating endpoint.

    ``model`` is what the client called it, ``max_tokens`` the parameter as given, for the histogram of it.
    ``await_seconds`` is how long the chunks of the prompt are awaited that another engine promised to the store.
    """

    chat: bool
    model: str
    adapter: Adapter | None
    prompts: list[Prompt]
    stream: bool
    options: StreamOptions
    salt: str
    max_tokens: int | None
    await_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against."""

    name: str
    max_model_len: int
    adapters: tuple[Adapter, ...] = ()

    @property
    def max_body_bytes(self) -> int:
        """Longest body worth reading: a longest prompt in JSON's longest spelling, and some."""
        return (1 << 20) + 64 * self.max_model_len


def parse_completion(raw: bytes, limits: ModelLimits) -> Generation:
    """Read the body of ``/v1/completions``.

    Raises:
        ApiError: malformed, unsupported, another model, or too long.
    """
    body = _decode(raw, _CompletionBody)
    _check(body, limits)
    if body.prompt is None or body.prompt == []:
        raise ApiError("either prompt or prompt_embeds must be provided and non-empty", "prompt")
    budget = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = [_planned(ids, budget, body, limits, "max_tokens") for ids in _prompt_ids(body.prompt)]
    return _generation(body, prompts, limits, chat=False, max_tokens=body.max_tokens)


def parse_chat(raw: bytes, limits: ModelLimits) -> Generation:
    """Read the body of ``/v1/chat/completions``. Raises as `parse_completion`."""
    body = _decode(raw, _ChatBody)
    _check(body, limits)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    budget = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = _planned(encode(_render(body)), budget, body, limits, field)
    return _generation(body, [prompt], limits, chat=True, max_tokens=budget)


def parse_tokenize(raw: bytes, limits: ModelLimits) -> tuple[list[int], bool]:
    """Read the body of ``/tokenize``: the token ids, and whether their strings are wanted too."""
    body = _decode(raw, _TokenizeBody)
    _check_model(body.model, limits)
    if body.tools:
        raise ApiError("tools is not supported by the emulator", "tools")
    if body.messages is not None:
        return encode(_render(body)), bool(body.return_token_strs)
    if body.prompt is None:
        raise ApiError("either prompt or messages must be given", "prompt")
    return encode(body.prompt), bool(body.return_token_strs)


def parse_detokenize(raw: bytes, limits: ModelLimits) -> list[int]:
    """Read the body of ``/detokenize``: the token ids."""
    body = _decode(raw, _DetokenizeBody)
    _check_model(body.model, limits)
    return _checked_ids(body.tokens, "tokens")


def _render(body: _ChatBody | _TokenizeBody) -> str:
    if body.continue_final_message and body.add_generation_prompt:
        message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise ApiError(message, "continue_final_message")
    return render_chat(body.messages or [], body.add_generation_prompt, body.continue_final_message)


def render_chat(
    messages: list[_Message], add_generation_prompt: bool = True, continue_final_message: bool = False
) -> str:
    """The chat template: a turn begins ``<|role|>``, its content follows after one space, a line feed ends it, unless
    the last one is to be continued.

    An answer's own leading space is that one space, so a conversation sent back begins with exactly the tokens that the
    earlier turns had.
    """
    if not messages:
        raise ApiError("messages must not be empty", "messages")
    turns = [f"<|{message.role}|> {_text(message).removeprefix(' ')}\n" for message in messages]
    if continue_final_message:
        turns[-1] = turns[-1].removesuffix("\n")
    return "".join(turns) + ("<|assistant|>" if add_generation_prompt else "")


def _text(message: _Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise ApiError(f"content parts of type {part.type!r} are not supported: only text is emulated", "messages")
    return "\n".join(part.text or "" for part in message.content)


def _decode(raw: bytes, shape: type[msgspec.Struct]) -> Any:
    try:
        return msgspec.json.decode(raw, type=shape)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        raise ApiError(str(error), found[1] if found and found[1] else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def _check(body: _Body, limits: ModelLimits) -> None:
    _check_model(body.model, limits)
    for field in ("n", "best_of"):
        if getattr(body, field) not in (None, 1):
            raise ApiError(f"{field}={getattr(body, field)} is not supported: one choice a prompt is emulated", field)
    if isinstance(body.response_format, dict) and body.response_format.get("type") == "text":
        body.response_format = None
    for field in _UNSUPPORTED:
        value = getattr(body, field)
        if value is not None and value is not False and value not in ([], ""):
            raise ApiError(f"{field} is not supported by the emulator", field)
    if body.stream_options is not None and not body.stream:
        raise ApiError("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.cache_salt == "":
        raise ApiError("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")


_UNSUPPORTED = (
    *("stop", "stop_token_ids", "bad_words", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix"),
    *("use_beam_search", "truncate_prompt_tokens", "response_format", "structured_outputs", "tools", "functions"),
    "prompt_embeds",
)


def _check_model(model: str | None, limits: ModelLimits) -> None:
    if model and model != limits.name and _adapter(model, limits) is None:
        message = f"The model `{model}` does not exist. Valid aliases: {limits.name}."
        raise ApiError(message, "model", 404, "NotFoundError")


def _adapter(model: str | None, limits: ModelLimits) -> Adapter | None:
    return next((adapter for adapter in limits.adapters if adapter.name == model), None)


def _prompt_ids(prompt: str | list[Any]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [encode(prompt)]
    if isinstance(prompt[0], int):
        return [_checked_ids(prompt, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(f"{len(prompt)} prompts in one request: at most {MAX_PROMPTS}", "prompt")
    if all(isinstance(item, str) for item in prompt):
        return [encode(item) for item in prompt]
    if all(isinstance(item, list) for item in prompt):
        return [_checked_ids(item, "prompt") for item in prompt]
    raise ApiError("prompt must be a string, strings, token ids, or lists of token ids, not a mixture", "prompt")


def _checked_ids(ids: list[Any], field: str) -> list[int]:
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < VOCAB_SIZE:
            raise ApiError(f"Token id {token_id} is out of vocabulary", field)
    return ids


def _planned(ids: list[int], budget: int | None, body: _Body, limits: ModelLimits, field: str) -> Prompt:
    if not ids:
        raise ApiError("The decoder prompt cannot be empty", "prompt")
    if budget is not None and budget < 1:
        raise ApiError(f"{field} must be at least 1, got {budget}.", field)
    if budget is not None and budget > limits.max_model_len:
        message = f"{field}={budget} cannot be greater than max_model_len={limits.max_model_len}. "
        raise ApiError(message + "Please request fewer output tokens.", field)
    if len(ids) > limits.max_model_len:
        message = (
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
            f"{len(ids)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise ApiError(message, "input_tokens")
    room = limits.max_model_len - len(ids)
    if room < 1:
        raise ApiError(f"{field} must be at least 1, got 0.", field)
    if not 0 <= body.min_tokens <= (room if budget is None else budget):
        raise ApiError(f"min_tokens must be between 0 and {field}, got {body.min_tokens}.", "min_tokens")
    seed = prompt_seed(ids)
    if budget is not None or body.ignore_eos:
        return Prompt(ids, seed, min(room, room if budget is None else budget), "length")
    low, high = _NATURAL_TOKENS
    natural = max(body.min_tokens, low + seed % (high - low + 1))
    return Prompt(ids, seed, min(room, natural), "stop" if natural <= room else "length")


def _generation(
    body: _Body, prompts: list[Prompt], limits: ModelLimits, *, chat: bool, max_tokens: int | None
) -> Generation:
    options = body.stream_options or StreamOptions()
    model, adapter = body.model or limits.name, _adapter(body.model, limits)
    return Generation(
        chat,
        model,
        adapter,
        prompts,
        bool(body.stream),
        options,
        body.cache_salt or "",
        max_tokens,
        _await_seconds(body.kv_transfer_params),
    )


def _await_seconds(params: Any) -> float:
    """As the connector reads it: what makes no sense there is ignored."""
    asked = params.get("kvhearth") if isinstance(params, dict) else None
    if not isinstance(asked, dict) or not asked.get("await_tokens"):
        return 0.0
    seconds: Any = asked.get("await_seconds")
    right = type(seconds) in (int, float) and 0 <= seconds <= LONGEST_AWAIT_SECONDS
    return float(seconds) if right else 0.0
