"""Several answers to one prompt, and log-probabilities, in both of OpenAI's shapes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from local_engine.http.sampling import of_choice
from local_engine.requests import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from prfaas.errors import EngineUnavailable, Overloaded

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "tiny", "prompt": "hi"}


class Scripts:
    """Gives each request to the engine the next of several scripts."""

    def __init__(self, core, scripts) -> None:
        self._submit, self._core, self._left = core.submit, core, list(scripts)
        core.submit = self.submit

    async def submit(self, request):
        script = self._left.pop(0)
        if isinstance(script, Exception):
            raise script
        self._core.script = script
        return await self._submit(request)


async def test_choices_are_in_order_and_usage_counts_the_prompt_once(server, says) -> None:
    slow = [0.05, *says("first", cached=0)]
    Scripts(server.core, [slow, says("2nd", cached=2), says("third", cached=1)])
    status, answer, _ = await server.post(TEXT, {**PROMPT, "n": 3})
    assert status == 200
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert [c["text"] for c in answer["choices"]] == ["first", "2nd", "third"]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == 2
    assert usage["completion_tokens"] == 6 + 4 + 6
    assert usage["total_tokens"] == 18
    # The first computed the prompt; that the others found it cached saves nobody anything.
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    ids = [request.request_id for request in server.core.requests]
    assert len(set(ids)) == 3
    _, page, _ = await server.get("/metrics")
    assert '"stop",model_name="tiny"} 3.0' in page


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_streamed_choices_come_as_they_are_made_each_in_order(server, says, path) -> None:
    texts = ["abc", "DEFGH", "ij"]
    Scripts(server.core, [
        [x for event in says(text, cached=1) for x in (event, 0.002)] for text in texts
    ])  # fmt: skip
    body = {**(HI if path == CHAT else PROMPT), "n": 3, "stream_options": {"include_usage": True}}
    events = await server.stream(path, body)
    assert events[-1] == b"[DONE]"
    *chunks, last = [json.loads(event) for event in events[:-1]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == sum(len(text) + 1 for text in texts)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    found = {index: [] for index in range(3)}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found[choice["index"]].append(choice)
    for index, text in enumerate(texts):
        parts = found[index]
        said = [
            part["delta"].get("content", "") if path == CHAT else part["text"] for part in parts
        ]
        assert "".join(said) == text
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        if path == CHAT:
            assert [part["delta"].get("role") for part in parts].count("assistant") == 1
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order), "one answer waited for another"


async def test_a_refusal_of_one_answer_refuses_all_and_leaves_none_running(server, says) -> None:
    Scripts(server.core, [[float("inf")], Overloaded("full", retry_after_s=1)])
    status, answer, _ = await server.post(TEXT, {**PROMPT, "n": 2})
    assert (status, answer["error"]["type"]) == (503, "overloaded")
    await server.core.wait_idle()


async def test_an_error_in_one_answer_ends_the_stream_and_cancels_the_others(server) -> None:
    error = TokenEvent((), error=EngineUnavailable("broke"))
    script = [TokenEvent(tuple(b"a")), 0.01, error]
    Scripts(server.core, [[TokenEvent(tuple(b"b")), float("inf")], script])
    events = await server.stream(TEXT, {**PROMPT, "n": 2})
    assert json.loads(events[-1])["error"]["message"] == "broke"
    await server.core.wait_idle()


async def test_a_client_that_hangs_up_cancels_all_its_answers(server, gone) -> None:
    server.core.script = [TokenEvent(tuple(b"a")), float("inf")]
    await gone(server, TEXT, {**PROMPT, "n": 4, "stream": True}, 0.15)
    await server.core.wait_idle()
    assert [stream.closed for stream in server.core.streams] == [True] * 4
    await asyncio.sleep(0)


def test_each_choice_has_a_seed_of_its_own_and_the_first_is_that_of_n_1() -> None:
    params = SamplingParams(5, seed=7)
    seeds = [of_choice(params, index).seed for index in range(50)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 50
    assert seeds == [of_choice(params, index).seed for index in range(50)]
    assert not {of_choice(replace(params, seed=8), index).seed for index in range(50)} & set(seeds)
    assert of_choice(SamplingParams(5), 3).seed is None


def told(text: bytes, *, hidden: bool = True) -> list[TokenEvent]:
    """A token a byte, each with a logprob of its own and one other token beside it."""
    events = [
        TokenEvent((byte,), logprobs=(TokenLogprobs(-0.5 - at, ((65, -0.25), (0xC3, -0.75))),))
        for at, byte in enumerate(text)
    ]
    last = TokenEvent((258,), finish_reason=FinishReason.STOP, logprobs=(TokenLogprobs(-9.0, ()),))
    return [*events, last] if hidden else events


async def test_a_chat_tells_logprobs_of_every_token_it_counts(server) -> None:
    body = {**HI, "logprobs": True, "top_logprobs": 2}
    server.core.script = told("hé".encode())
    _, answer, _ = await server.post(CHAT, body)
    assert server.core.requests[0].sampling.logprobs == 2
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "hé"
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(content) == answer["usage"]["completion_tokens"] == 4
    assert content[0] == {
        "token": "h", "logprob": -0.5, "bytes": [104],
        "top_logprobs": [
            {"token": "A", "logprob": -0.25, "bytes": [65]},
            {"token": "\\xc3", "logprob": -0.75, "bytes": [0xC3]},
        ],
    }  # fmt: skip
    assert b"".join(bytes(one["bytes"]) for one in content[:3]).decode() == "hé"
    assert content[3]["token"] == "<|im_end|>"

    events = [json.loads(e)["choices"][0] for e in (await server.stream(CHAT, body))[:-1]]
    streamed = [one for e in events if e["logprobs"] for one in e["logprobs"]["content"]]
    assert streamed == content
    assert "".join(e["delta"].get("content", "") for e in events) == "hé"


async def test_a_completion_tells_them_in_its_own_shape(server) -> None:
    server.core.script = told("hé!".encode())
    _, answer, _ = await server.post(TEXT, {**PROMPT, "logprobs": 2})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [-0.5, -1.5, -2.5, -3.5, -9.0]
    assert logprobs["top_logprobs"][0] == {"A": -0.25, "bytes:\\xc3": -0.75, "h": -0.5}
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    events = await server.stream(TEXT, {**PROMPT, "logprobs": 2})
    parts = [json.loads(e)["choices"][0]["logprobs"] for e in events[:-1]]
    for name in logprobs:
        assert [one for part in parts if part for one in part[name]] == logprobs[name]


async def test_tokens_after_a_stop_string_have_no_logprobs(server) -> None:
    together = [one for event in told(b"a STOP b", hidden=False) for one in event.logprobs]
    server.core.script = [TokenEvent(tuple(b"a STOP b"), logprobs=tuple(together)), float("inf")]
    _, answer, _ = await server.post(TEXT, {**PROMPT, "logprobs": 0, "stop": "STOP"})
    assert answer["choices"][0]["text"] == "a "
    assert "".join(answer["choices"][0]["logprobs"]["tokens"]) == "a STOP"
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(("path", "fields"), [(TEXT, {"logprobs": None}), (CHAT, {})])
async def test_without_the_wish_there_are_none(server, says, path, fields) -> None:
    server.core.script = says("ok")
    _, answer, _ = await server.post(path, {**(HI if path == CHAT else PROMPT), **fields})
    assert answer["choices"][0]["logprobs"] is None
    assert server.core.requests[0].sampling.logprobs is None


async def test_a_paced_engine_refuses_to_tell_logprobs(server) -> None:
    server.state.become_ready(replace(server.serving, paced="slow"))
    for path, body in ((TEXT, {**PROMPT, "logprobs": 1}), (CHAT, {**HI, "logprobs": True})):
        status, answer, _ = await server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, "logprobs")
