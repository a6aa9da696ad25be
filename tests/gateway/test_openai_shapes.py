"""OpenAI's own client reads what engines answer through the gateway: calls, events, broken ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.app import Gateway
from policies.registry import make_policy
from prfaas.testing.gateway_setup import MODEL, gateway_settings, until
from prfaas.testing.routed_engine import RoutedEngine, routed_engine, says, streams

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


def call(arguments: str, **named: str) -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": named["name"]} if named else {})}
    ident = {"id": named["id"], "type": "function"} if named else {}
    return {"tool_calls": [{"index": 0, "function": function, **ident}]}


def event(kind: str, **fields: Any) -> bytes:
    data = {"type": kind, "sequence_number": 0, **fields}
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


@asynccontextmanager
async def served(
    answers: dict[str, Any],
) -> AsyncIterator[tuple[openai.AsyncOpenAI, RoutedEngine]]:
    async with routed_engine(answers) as engine:
        chosen = gateway_settings(engine.url, None, peers=())
        gateway = Gateway(chosen, make_policy(chosen.gateway.policy), None)
        async with (
            gateway.running(),
            openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="k", max_retries=0
            ) as client,
        ):
            await until(lambda: gateway.engines.reachable, "the engine")
            yield client, engine


async def test_calls_of_tools_arrive_in_pieces() -> None:
    pieces = [
        chunk({"role": "assistant", "content": None}),
        chunk(call("", id="call_1", name="get_weather")),
        chunk(call('{"pla')),
        chunk(call('ce":"here"}')),
        chunk({}, "tool_calls"),
        b"data: [DONE]\n\n",
    ]
    async with served({CHAT: streams(*pieces)}) as (client, engine):
        tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", stream=True
        )
        arguments, reasons = "", []
        async for each in stream:
            for made in each.choices[0].delta.tool_calls or ():
                assert made.function is not None
                arguments += made.function.arguments or ""
            reasons.append(each.choices[0].finish_reason)
        assert json.loads(arguments) == {"place": "here"}
        assert reasons[-1] == "tool_calls"
        assert json.loads(engine.seen[0].body)["tool_choice"] == "required"
        assert engine.seen[0].headers["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}},
        },
    ],
)
async def test_a_response_format_reaches_an_engine_that_may_honour_it(asked: Any) -> None:
    whole = {
        "id": "c", "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "{}"},
            }
        ],
    }  # fmt: skip
    async with served({CHAT: says(whole)}) as (client, engine):
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format=asked
        )
        assert answer.choices[0].message.content == "{}"
        assert json.loads(engine.seen[0].body)["response_format"] == asked


async def test_a_chat_that_breaks_off_is_an_error_of_the_client() -> None:
    """Case 38."""
    async with served({CHAT: streams(chunk({"content": "a"}))}) as (client, _):
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="ended the stream early"):
            async for _ in stream:
                pass


RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": MODEL, "status": "completed",
    "output": [
        {
            "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "hello", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
}  # fmt: skip


async def test_responses_whole_and_streamed() -> None:
    async with served({RESPONSES: says(RESPONSE)}) as (client, engine):
        answer = await client.responses.create(model=MODEL, input="hi")
        assert answer.output_text == "hello"
        engine.answers[RESPONSES] = streams(
            event("response.created", response=RESPONSE),
            event("response.output_text.delta", delta="hello", item_id="msg_1"),
            event("response.completed", response=RESPONSE),
        )
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        kinds = [each.type async for each in stream]
        assert kinds == [
            "response.created",
            "response.output_text.delta",
            "response.completed",
        ]


async def test_responses_that_break_off_are_an_error_of_the_client() -> None:
    answers = {RESPONSES: streams(event("response.created", response=RESPONSE))}
    async with served(answers) as (client, _):
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        with pytest.raises(openai.APIError, match="ended the stream early"):
            async for _ in stream:
                pass


async def test_embeddings() -> None:
    listed = {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}],
        "model": MODEL,
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    }
    async with served({"/v1/embeddings": says(listed)}) as (client, _):
        answer = await client.embeddings.create(model=MODEL, input="hi", encoding_format="float")
        assert answer.data[0].embedding == [0.5, 1.0]
