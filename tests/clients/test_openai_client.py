"""OpenAI's own client against a gateway and the embedded engine: `base_url` is all it needs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from prfaas.testing.client_stack import MAX_CONTEXT, MODEL, ClientStack
from prfaas.testing.waiting import eventually

PROMPT = "The quick brown fox jumps over the lazy dog."
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


@pytest.fixture
def client(stack: ClientStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=stack.base_url, api_key="unused", max_retries=0, timeout=60
    ) as made:
        yield made


@pytest.fixture
async def async_client(stack: ClientStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=stack.base_url, api_key="unused", max_retries=0, timeout=60
    ) as made:
        yield made


def test_a_chat_and_its_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0
    )
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    again = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0
    )
    assert again.choices[0].message.content == choice.message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_a_stream_says_the_same_with_one_usage_chunk_at_its_end(client: openai.OpenAI) -> None:
    """Case 37."""
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
    assert {c.id for c in chunks} == {chunks[0].id}


def test_completions_with_everything_that_shapes_them(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, n=2, seed=7, temperature=0.8, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or ()) == 6
        assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs or ())
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12  # of both; the prompt counts once


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    """Case 36."""
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    text = whole.choices[0].text
    stop = text[3:6]
    cut = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_one_token_is_an_ordinary_request(client: openai.OpenAI) -> None:
    """Case 35."""
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason == "length"


def test_tools_and_what_came_of_them_reach_the_template(client: openai.OpenAI) -> None:
    without = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    call: Any = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"place":"here"}'},
    }
    answered = client.chat.completions.create(
        model=MODEL,
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
        tools=[WEATHER],
        tool_choice="auto",
        max_tokens=1,
    )
    assert answered.usage is not None
    assert without.usage is not None
    assert answered.usage.prompt_tokens > without.usage.prompt_tokens + 20


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    card = client.models.retrieve(MODEL)
    assert card.object == "model"
    assert card.model_dump()["max_model_len"] == MAX_CONTEXT
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("changed", "error", "code", "param"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", "model"),
        ({"max_tokens": 0}, openai.BadRequestError, "invalid_request_error", "max_tokens"),
        ({"max_tokens": -1}, openai.BadRequestError, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded", None),
        ({"temperature": -1}, openai.BadRequestError, "invalid_request_error", "temperature"),
        ({"n": 10**6}, openai.BadRequestError, "invalid_request_error", "n"),
        (
            {"response_format": {"type": "json_object"}},
            openai.BadRequestError,
            "invalid_request_error",
            "response_format",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required"},
            openai.BadRequestError,
            "invalid_request_error",
            "tool_choice",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own_classes_with_code_and_param(
    client: openai.OpenAI,
    changed: dict[str, Any],
    error: type[openai.APIStatusError],
    code: str,
    param: str | None,
    stream: bool,
) -> None:
    """Cases 35 and 39; a stream that never began has a status of its own."""
    wanted: Any = {"model": MODEL, "messages": MESSAGES, "stream": stream, **changed}
    with pytest.raises(error) as raised:
        client.chat.completions.create(**wanted)
    assert raised.value.code == code
    if param is not None:
        assert raised.value.param == param
    assert raised.value.request_id


def test_a_prompt_over_the_context_names_both_numbers(client: openai.OpenAI) -> None:
    """Case 39."""
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=MODEL, prompt="lazy dog " * 5000, max_tokens=1)
    assert raised.value.code == "context_length_exceeded"
    numbers = [int(number) for number in re.findall(r"\d+", raised.value.message)]
    assert MAX_CONTEXT in numbers
    assert max(numbers) > MAX_CONTEXT


def test_response_format_text_asks_for_nothing_and_is_served(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=2, response_format={"type": "text"}
    )
    assert answer.choices


def test_what_this_engine_lacks_is_a_404_that_says_so(client: openai.OpenAI) -> None:
    for ask, path in (
        (lambda: client.responses.create(model=MODEL, input="hi"), "/v1/responses"),
        (lambda: client.embeddings.create(model=MODEL, input="hi"), "/v1/embeddings"),
    ):
        with pytest.raises(openai.NotFoundError, match=path):
            ask()


def test_request_ids_and_raw_answers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().choices


def test_the_engines_tokenizer_is_there_too(client: openai.OpenAI, stack: ClientStack) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT}
    tokens: Any = client.post(f"{stack.gateway}/tokenize", body=asked, cast_to=dict)
    ids = tokens["tokens"]
    text: Any = client.post(
        f"{stack.gateway}/detokenize", body={"model": MODEL, "tokens": ids}, cast_to=dict
    )
    assert PROMPT in text["prompt"]
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)


async def test_many_at_once_through_the_async_client(async_client: openai.AsyncOpenAI) -> None:
    async def streamed(at: int) -> str:
        stream = await async_client.completions.create(
            model=MODEL, prompt=f"{at}: {PROMPT}", max_tokens=6, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def whole(at: int) -> str:
        answer = await async_client.completions.create(
            model=MODEL, prompt=f"{at}: {PROMPT}", max_tokens=6, temperature=0
        )
        return answer.choices[0].text

    texts = await asyncio.gather(*map(streamed, range(6)), *map(whole, range(6)))
    assert all(texts)
    assert len(texts) == 12


async def test_leaving_a_stream_early_ends_it_everywhere(
    async_client: openai.AsyncOpenAI, stack: ClientStack
) -> None:
    """Case 21."""
    stream = await async_client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=3000, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await eventually(
        lambda: "prfaas_gateway_in_flight_requests 0.0" in stack.metrics(), within_s=30
    )
