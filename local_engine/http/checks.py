"""What a request asks for, checked against what this engine can do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from local_engine.http.schema import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
)
from local_engine.requests import SamplingParams
from prfaas.errors import ContextTooLong, InvalidRequest

_NO_CHANGE: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
}
"""Values, besides the default and empty ones, that ask for nothing this engine lacks."""

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_UNSERVED_MESSAGE_FIELDS = ("tool_calls", "tool_call_id", "function_call", "audio", "refusal")
_SEED_BITS = 64
_MAX_PARAMS_DEPTH = 16
"""Of `kv_transfer_params`, which go on to the agent as they are: what passes here passes there."""


def _refusable(kind: type[ChatRequest] | type[CompletionRequest]) -> tuple[tuple[str, Any], ...]:
    fields = msgspec.structs.fields(kind)
    return tuple((f.name, f.default) for f in fields if f.name not in kind.ACTED_ON)


_REFUSABLE = {kind: _refusable(kind) for kind in (ChatRequest, CompletionRequest)}


def refuse_unsupported(request: ChatRequest | CompletionRequest) -> None:
    """Raise InvalidRequest naming the first field whose wish this engine cannot honour."""
    for name, default in _REFUSABLE[type(request)]:
        value = getattr(request, name)
        if value == default or value in _EMPTY or value in _NO_CHANGE.get(name, ()):
            continue
        raise InvalidRequest(f"{name} is not supported by this engine", param=name)
    if request.return_token_ids and request.stream:
        name = "return_token_ids"
        raise InvalidRequest(f"{name} is not supported in a stream", param=name)
    if _depth(request.kv_transfer_params) > _MAX_PARAMS_DEPTH:
        name = "kv_transfer_params"
        raise InvalidRequest(f"{name} is nested too deeply", param=name)
    options = request.stream_options
    if options is None:
        return
    if options.continuous_usage_stats:
        name = "stream_options.continuous_usage_stats"
        raise InvalidRequest(f"{name} is not supported by this engine", param=name)
    if not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")


def _depth(value: object) -> int:
    """Levels of objects and lists in a JSON value, counted no further than it matters."""
    level: list[Any] = [value]
    depth = 0
    while depth <= _MAX_PARAMS_DEPTH:
        level = [node for node in level if isinstance(node, dict | list)]
        if not level:
            break
        depth += 1
        inner = [node.values() if isinstance(node, dict) else node for node in level]
        level = [child for children in inner for child in children]
    return depth


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them. Raises InvalidRequest naming the message."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    return [_template_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise InvalidRequest(f"{where}.role: tools are not supported", param=f"{where}.role")
    for name in _UNSERVED_MESSAGE_FIELDS:
        if getattr(message, name) not in _EMPTY:
            raise InvalidRequest(f"{where}.{name} is not supported", param=f"{where}.{name}")
    content = message.content
    if content is None:
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    if not isinstance(content, str):
        texts = []
        for i, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"{where}.content[{i}]: only parts of type text are supported",
                    param=f"{where}.content[{i}]",
                )
            texts.append(part.text)
        content = "\n".join(texts)
    # Templates older than the name "developer" know the same speaker as "system".
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content, **named}


def check_tokens(tokens: Iterable[Any], vocab_size: int, param: str) -> tuple[int, ...]:
    """Token ids as a tuple. Raises InvalidRequest for anything outside [0, vocab_size)."""
    ids = tuple(tokens)
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return ids
    for at, token in enumerate(ids):
        if type(token) is not int:
            raise InvalidRequest(f"{param}[{at}] is not a token id", param=param)
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{param}[{at}]: token {token} is outside the vocabulary of {vocab_size}",
                param=param,
            )
    return ids


def check_prompt_length(tokens: int, max_context: int, max_prompt: int, param: str) -> None:
    """A prompt needs a token, and room for one more. Raises InvalidRequest, ContextTooLong."""
    if tokens == 0:
        raise InvalidRequest("the prompt is empty", param=param)
    if tokens > max_prompt:
        raise ContextTooLong(
            f"the prompt has {tokens} tokens, over the limit of {max_prompt}", param=param
        )
    if tokens >= max_context:
        raise ContextTooLong(
            f"the prompt has {tokens} tokens; the context of {max_context} tokens must hold it "
            "and an answer of at least one",
            param=param,
        )


def sampling_params(
    request: ChatRequest | CompletionRequest, prompt_tokens: int, max_context: int, vocab_size: int
) -> SamplingParams:
    """How to draw the answer. Raises InvalidRequest or ContextTooLong naming the field."""
    temperature = 1.0 if request.temperature is None else request.temperature
    _require(0 <= temperature <= 2, "temperature", "must be between 0 and 2")
    top_p = 1.0 if request.top_p is None else request.top_p
    _require(0 < top_p <= 1, "top_p", "must be above 0 and at most 1")
    top_k = 0 if request.top_k is None or request.top_k == -1 else request.top_k
    _require(top_k >= 0, "top_k", "must be positive, or 0 or -1 for off")
    seed = request.seed
    _require(
        seed is None or -(1 << (_SEED_BITS - 1)) <= seed < 1 << _SEED_BITS,
        "seed",
        f"must fit {_SEED_BITS} bits",
    )
    stop_ids = request.stop_token_ids or []
    _require(len(stop_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}")
    return SamplingParams(
        max_tokens=_max_tokens(request, prompt_tokens, max_context),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop_token_ids=frozenset(check_tokens(stop_ids, vocab_size, "stop_token_ids")),
        ignore_eos=request.ignore_eos,
    )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The request's stop strings. Raises InvalidRequest."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    _require(len(stops) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
    for text in stops:
        _require(0 < len(text) <= MAX_STOP_CHARS, "stop", f"1 to {MAX_STOP_CHARS} characters each")
    return stops


def _max_tokens(
    request: ChatRequest | CompletionRequest, prompt_tokens: int, max_context: int
) -> int:
    """`max_tokens`, or its newer name for chats; by default what is left of the context."""
    room = max_context - prompt_tokens
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        newer = request.max_completion_tokens
        if asked is not None and asked != newer:
            raise InvalidRequest(
                f"max_completion_tokens is {newer}, max_tokens is {asked}", param="max_tokens"
            )
        name, asked = "max_completion_tokens", newer
    if asked is None:
        return room
    _require(asked >= 1, name, "must be at least 1")
    if asked > room:
        raise ContextTooLong(
            f"{name} is {asked}; with {prompt_tokens} prompt tokens the context of {max_context} "
            f"tokens leaves {room}",
            param=name,
        )
    return asked


def _require(condition: bool, param: str, problem: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param}: {problem}", param=param)
