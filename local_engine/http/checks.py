"""What a request asks for, checked against what this engine can do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from local_engine.http.schema import ChatMessage, ChatRequest, CompletionRequest
from local_engine.http.tools import template_calls
from prfaas.errors import ContextTooLong, InvalidRequest

_NO_CHANGE: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "function_call": ("none", "auto"),
}
"""Values, besides the default and empty ones, that ask for nothing this engine lacks."""

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_UNSERVED_MESSAGE_FIELDS = ("function_call", "audio", "refusal")
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
    if message.role == "function":
        raise InvalidRequest(
            f"{where}.role: functions are not supported, tools are", param=f"{where}.role"
        )
    for name in _UNSERVED_MESSAGE_FIELDS:
        if getattr(message, name) not in _EMPTY:
            raise InvalidRequest(f"{where}.{name} is not supported", param=f"{where}.{name}")
    # Templates older than the name "developer" know the same speaker as "system".
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    tools = _tool_fields(message, where)
    return {"role": role, "content": _content(message, where), **named, **tools}


def _tool_fields(message: ChatMessage, where: str) -> dict[str, Any]:
    """What ties calls and their results together; each belongs to one role."""
    if (message.role == "tool") != bool(message.tool_call_id):
        problem = "is missing" if message.role == "tool" else "is for messages of role tool"
        at = f"{where}.tool_call_id"
        raise InvalidRequest(f"{at} {problem}", param=at)
    if message.tool_calls and message.role != "assistant":
        at = f"{where}.tool_calls"
        raise InvalidRequest(f"{at} is for messages of role assistant", param=at)
    if message.tool_calls:
        return {"tool_calls": template_calls(message.tool_calls, f"{where}.tool_calls")}
    return {"tool_call_id": message.tool_call_id} if message.tool_call_id else {}


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if content is None:
        if message.tool_calls:
            return ""
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f"{where}.content[{i}]: only parts of type text are supported",
                param=f"{where}.content[{i}]",
            )
        texts.append(part.text)
    return "\n".join(texts)


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
