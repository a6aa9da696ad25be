from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from local_engine.http.checks import refuse_unsupported, template_messages
from local_engine.http.schema import ChatMessage, ChatRequest, CompletionRequest
from prfaas.errors import InvalidRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

BAD_REQUESTS = [
    (TEXT, {"prompt": "x" * 200}, "context_length_exceeded", "prompt"),
    (TEXT, {"prompt": ""}, "invalid_request_error", "prompt"),
    (TEXT, {"prompt": []}, "invalid_request_error", "prompt"),
    (TEXT, {"prompt": ["a", "b"]}, "invalid_request_error", "prompt"),
    (TEXT, {"prompt": [1, "b"]}, "invalid_request_error", "prompt"),
    (TEXT, {"prompt": [1, True]}, "invalid_request_error", "prompt"),
    (TEXT, {"prompt": [1, 259]}, "invalid_request_error", "prompt"),
    (TEXT, {"prompt": [-1]}, "invalid_request_error", "prompt"),
    (TEXT, {"prompt": [[[1]]]}, "invalid_request_error", "prompt"),
    (TEXT, {"prompt": 3}, "invalid_request_error", "prompt"),
    (TEXT, {}, "invalid_request_error", "prompt"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "invalid_request_error", "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": -1}, "invalid_request_error", "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 200}, "context_length_exceeded", "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": "9"}, "invalid_request_error", "max_tokens"),
    (TEXT, {"prompt": "x", "temperature": 2.1}, "invalid_request_error", "temperature"),
    (TEXT, {"prompt": "x", "temperature": -1}, "invalid_request_error", "temperature"),
    (TEXT, {"prompt": "x", "top_p": 0}, "invalid_request_error", "top_p"),
    (TEXT, {"prompt": "x", "top_k": -2}, "invalid_request_error", "top_k"),
    (TEXT, {"prompt": "x", "seed": 1 << 64}, "invalid_request_error", "seed"),
    (TEXT, {"prompt": "x", "stop": ["a"] * 5}, "invalid_request_error", "stop"),
    (TEXT, {"prompt": "x", "stop": [""]}, "invalid_request_error", "stop"),
    (TEXT, {"prompt": "x", "stop": "y" * 1025}, "invalid_request_error", "stop"),
    (TEXT, {"prompt": "x", "stop_token_ids": [300]}, "invalid_request_error", "stop_token_ids"),
    (TEXT, {"prompt": "x", "echo": True}, "invalid_request_error", "echo"),
    (TEXT, {"prompt": "x", "logprobs": 21}, "invalid_request_error", "logprobs"),
    (TEXT, {"prompt": "x", "logprobs": -1}, "invalid_request_error", "logprobs"),
    (TEXT, {"prompt": "x", "logprobs": True}, "invalid_request_error", "logprobs"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "invalid_request_error", "suffix"),
    (TEXT, {"prompt": "x", "best_of": 2}, "invalid_request_error", "best_of"),
    (TEXT, {"prompt": "x", "n": 2, "best_of": 3}, "invalid_request_error", "best_of"),
    (TEXT, {"prompt": "x", "n": 2, "kv_transfer_params": {}}, "invalid_request_error", "n"),
    (TEXT, {"prompt": "x", "min_p": 1.1}, "invalid_request_error", "min_p"),
    (TEXT, {"prompt": "x", "min_p": -0.1}, "invalid_request_error", "min_p"),
    (TEXT, {"prompt": "x", "kv_transfer_params": 3}, "invalid_request_error", "kv_transfer_params"),
    (
        TEXT,
        {"prompt": "x", "kv_transfer_params": {"a": json.loads("[" * 16 + "]" * 16)}},
        "invalid_request_error",
        "kv_transfer_params",
    ),
    (TEXT, {"prompt": "x", "unheard_of": 1}, "invalid_request_error", "unheard_of"),
    (TEXT, {"prompt": "x", "stream_options": {}}, "invalid_request_error", "stream_options"),
    (CHAT, {"messages": []}, "invalid_request_error", "messages"),
    (CHAT, {"messages": "hi"}, "invalid_request_error", "messages"),
    (CHAT, {**HI, "n": 0}, "invalid_request_error", "n"),
    (CHAT, {**HI, "n": 129}, "invalid_request_error", "n"),
    (CHAT, {**HI, "tools": [TOOL]}, "invalid_request_error", "tools"),
    (CHAT, {**HI, "tools": [{}]}, "invalid_request_error", "tools[0].type"),
    (CHAT, {**HI, "tools": [TOOL, 3]}, "invalid_request_error", "tools[1]"),
    (CHAT, {**HI, "tools": [{"type": "custom"}]}, "invalid_request_error", "tools[0].type"),
    (CHAT, {**HI, "tools": [{"type": "function"}]}, "invalid_request_error", "tools[0].function"),
    (
        CHAT,
        {**HI, "tools": [{"type": "function", "function": {"name": "a b"}}]},
        "invalid_request_error",
        "tools[0].function.name",
    ),
    (
        CHAT,
        {**HI, "tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        "invalid_request_error",
        "tools[0].function.parameters",
    ),
    (
        CHAT,
        {**HI, "tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
        "invalid_request_error",
        "tools[0].function.strict",
    ),
    (CHAT, {**HI, "tools": [TOOL] * 129}, "invalid_request_error", "tools"),
    (CHAT, {**HI, "tool_choice": "required"}, "invalid_request_error", "tool_choice"),
    (
        CHAT,
        {**HI, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "invalid_request_error",
        "tool_choice",
    ),
    (
        CHAT,
        {**HI, "tools": [TOOL], "parallel_tool_calls": False},
        "invalid_request_error",
        "parallel_tool_calls",
    ),
    (CHAT, {**HI, "functions": [{"name": "f"}]}, "invalid_request_error", "functions"),
    (CHAT, {**HI, "top_logprobs": 2}, "invalid_request_error", "top_logprobs"),
    (
        CHAT,
        {**HI, "logprobs": True, "top_logprobs": 21},
        "invalid_request_error",
        "top_logprobs",
    ),
    (CHAT, {**HI, "logprobs": 2}, "invalid_request_error", "logprobs"),
    (CHAT, {**HI, "logit_bias": {"259": 1}}, "invalid_request_error", "logit_bias"),
    (CHAT, {**HI, "logit_bias": {"-1": 1}}, "invalid_request_error", "logit_bias"),
    (CHAT, {**HI, "logit_bias": {"a": 1}}, "invalid_request_error", "logit_bias"),
    (CHAT, {**HI, "logit_bias": {"5": 1, "05": 2}}, "invalid_request_error", "logit_bias"),
    (CHAT, {**HI, "logit_bias": {"5": 100.5}}, "invalid_request_error", "logit_bias"),
    (CHAT, {**HI, "logit_bias": {"5": "1"}}, "invalid_request_error", "logit_bias[...]"),
    (CHAT, {**HI, "presence_penalty": 2.1}, "invalid_request_error", "presence_penalty"),
    (CHAT, {**HI, "frequency_penalty": -3}, "invalid_request_error", "frequency_penalty"),
    (CHAT, {**HI, "repetition_penalty": 0}, "invalid_request_error", "repetition_penalty"),
    (CHAT, {**HI, "repetition_penalty": 1e9}, "invalid_request_error", "repetition_penalty"),
    (CHAT, {**HI, "min_tokens": 1}, "invalid_request_error", "min_tokens"),
    (CHAT, {**HI, "modalities": ["audio"]}, "invalid_request_error", "modalities"),
    (CHAT, {**HI, "audio": {"voice": "x"}}, "invalid_request_error", "audio"),
    (CHAT, {**HI, "store": True}, "invalid_request_error", "store"),
    (CHAT, {**HI, "reasoning_effort": "low"}, "invalid_request_error", "reasoning_effort"),
    (
        CHAT,
        {**HI, "response_format": {"type": "json_object"}},
        "invalid_request_error",
        "response_format",
    ),
    (
        CHAT,
        {**HI, "max_tokens": 5, "max_completion_tokens": 6},
        "invalid_request_error",
        "max_tokens",
    ),
    (
        CHAT,
        {**HI, "max_completion_tokens": 0},
        "invalid_request_error",
        "max_completion_tokens",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "invalid_request_error",
        "messages[0].content[0]",
    ),
    (
        CHAT,
        {"messages": [{"role": "function", "content": "x", "name": "f"}]},
        "invalid_request_error",
        "messages[0].role",
    ),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "x"}]},
        "invalid_request_error",
        "messages[0].tool_call_id",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
        "invalid_request_error",
        "messages[0].tool_call_id",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
        "invalid_request_error",
        "messages[0].tool_calls",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "invalid_request_error",
        "messages[0].tool_calls[0].function",
    ),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        CALL,
                        {"function": {"name": "f", "arguments": "[1]"}},
                    ],
                }
            ]
        },
        "invalid_request_error",
        "messages[0].tool_calls[1].function.arguments",
    ),
    (
        CHAT,
        {"messages": [{"role": "user"}]},
        "invalid_request_error",
        "messages[0].content",
    ),
    ("/tokenize", {}, "invalid_request_error", "prompt"),
    ("/tokenize", {"prompt": "x", "messages": []}, "invalid_request_error", "prompt"),
    ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "invalid_request_error", "tools"),
    ("/tokenize", {"messages": HI["messages"], "tools": [TOOL]}, "invalid_request_error", "tools"),
    ("/detokenize", {"tokens": [999]}, "invalid_request_error", "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "invalid_request_error", "tokens[0]"),
]


@pytest.mark.parametrize(
    ("path", "body", "kind", "param"),
    BAD_REQUESTS,
    ids=[f"{path}-{param}-{i}" for i, (path, _, _, param) in enumerate(BAD_REQUESTS)],
)
async def test_a_bad_request_is_a_400_that_names_the_field(server, path, body, kind, param) -> None:
    status, answer, _ = await server.post(path, body)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == kind
    assert answer["error"]["param"] == param
    assert not server.core.requests


async def test_a_prompt_over_the_context_is_refused_with_both_numbers(server) -> None:
    _, answer, _ = await server.post(TEXT, {"prompt": "x" * 321})
    assert "321" in answer["error"]["message"]
    assert "200" in answer["error"]["message"]
    assert answer["error"]["code"] == "context_length_exceeded"


async def test_a_prompt_over_the_limit_is_refused_with_both_numbers(serve) -> None:
    async with serve(max_prompt_tokens=50) as server:
        status, answer, _ = await server.post(TEXT, {"prompt": "x" * 51})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "51" in answer["error"]["message"]
        assert "50" in answer["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0},
        {"response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "auto"},
        {"user": "u", "metadata": {"k": "v"}, "store": False, "prompt_cache_key": "k"},
        {"n": None, "stop": None, "max_tokens": None, "temperature": None, "stream": None},
        {"seed": -5, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0},
        {"best_of": 1, "logit_bias": None, "top_logprobs": None, "min_p": None},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
)
async def test_fields_that_ask_for_no_change_pass(server, says, fields) -> None:
    server.core.script = says("ok")
    status, answer, _ = await server.post(CHAT, {**HI, **fields})
    assert status == 200, answer


REFUSABLE = [
    (kind, field.name)
    for kind in (ChatRequest, CompletionRequest)
    for field in msgspec.structs.fields(kind)
    if field.name not in kind.ACTED_ON
]
WISHES: tuple[Any, ...] = (True, 2, 0.5, "json", ["x"], [3], {"a": 1}, False)


@pytest.mark.parametrize(("kind", "name"), REFUSABLE)
def test_no_field_is_accepted_and_ignored(kind: Any, name: str) -> None:
    """Whatever is neither honoured nor harmless is refused as soon as it asks for something."""
    required = {"messages": []} if kind is ChatRequest else {"prompt": "x"}
    refused = 0
    for wish in WISHES:
        try:
            request = msgspec.convert({**required, name: wish}, kind)
        except msgspec.ValidationError:
            continue
        if wish == next(f.default for f in msgspec.structs.fields(kind) if f.name == name):
            continue
        with pytest.raises(InvalidRequest) as caught:
            refuse_unsupported(request)
        assert caught.value.param == name
        refused += 1
    assert refused


def test_messages_reach_the_template_as_plain_text() -> None:
    messages = msgspec.convert(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "ann", "content": [
                {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
            ]},
            {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
            {"role": "assistant", "tool_calls": [
                {"id": "c1", "type": "function", "function": {
                    "name": "f", "arguments": '{"a": [1, "é"]}',
                }},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
            ]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ],
        list[ChatMessage],
    )  # fmt: skip
    assert template_messages(messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c1", "type": "function", "function": {
                "name": "f", "arguments": {"a": [1, "é"]},
            }},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]  # fmt: skip
