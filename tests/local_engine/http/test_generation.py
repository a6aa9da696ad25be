from __future__ import annotations

import json

import pytest

from local_engine.requests import TokenEvent

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "tiny", "prompt": "hi"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [[float("inf")], [TokenEvent(tuple(b"a")), float("inf")]],
    ids=["before the first token", "while decoding"],
)
async def test_a_client_that_hangs_up_cancels_its_request(server, gone, stream, script) -> None:
    server.core.script = script
    await gone(server, CHAT, {**HI, "stream": stream}, 0.15)
    await server.core.wait_idle()
    assert server.core.streams[0].closed
    _, metrics, _ = await server.get("/metrics")
    label = 'finished_reason="abort",model_name="tiny"'
    assert f'vllm:request_success_total{{engine="0",{label}}} 1.0' in metrics


async def test_a_stop_string_ends_the_request_in_the_engine(server) -> None:
    server.core.script = [TokenEvent(tuple(b"a ST")), TokenEvent(tuple(b"OP b")), float("inf")]
    status, answer, _ = await server.post(TEXT, {**PROMPT, "stop": "STOP"})
    assert status == 200
    assert answer["choices"][0]["text"] == "a "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 6
    await server.core.wait_idle()


async def test_a_streamed_stop_string_shows_nothing_of_itself(server) -> None:
    server.core.script = [TokenEvent((b,)) for b in b"a STx STOP b"]
    events = await server.stream(TEXT, {**PROMPT, "stop": ["STOP", "never"]})
    texts = [json.loads(e)["choices"][0]["text"] for e in events[:-1]]
    assert "".join(texts) == "a STx "
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"


async def test_a_request_past_its_time_gets_503_and_is_cancelled(serve) -> None:
    async with serve(request_timeout_s=0.05) as server:
        server.core.script = [float("inf")]
        status, body, headers = await server.post(CHAT, HI)
        assert (status, body["error"]["type"]) == (503, "overloaded")
        assert headers["Retry-After"] == "1"
        server.core.script = [TokenEvent(tuple(b"a")), float("inf")]
        events = await server.stream(CHAT, HI)
        assert json.loads(events[-1])["error"]["type"] == "overloaded"
        await server.core.wait_idle()


async def test_two_requests_with_one_id_are_two_to_the_engine(server, says) -> None:
    server.core.script = says("ok")
    for _ in range(2):
        await server.post(CHAT, HI, headers={"X-Request-Id": "same"})
    first, second = server.core.requests
    assert first.request_id != second.request_id


async def test_everything_the_engine_honours_reaches_it(server, says) -> None:
    server.core.script = says("ok")
    params = {"version": 1, "anything": {"nested": [1, None, "x"]}}
    await server.post(TEXT, {
        **PROMPT, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 11,
        "stop_token_ids": [1, 2], "ignore_eos": True, "cache_salt": "tenant", "min_p": 0.25,
        "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 0.5,
        "logit_bias": {"7": -3, "258": 2.5}, "logprobs": 4,
        "kv_transfer_params": params, "user": "u", "metadata": {"a": "b"}, "store": False,
    })  # fmt: skip
    (request,) = server.core.requests
    assert request.sampling.max_tokens == 7
    assert request.sampling.temperature == 0.5
    assert request.sampling.top_p == 0.9
    assert request.sampling.top_k == 40
    assert request.sampling.seed == 11
    assert request.sampling.stop_token_ids == {1, 2}
    assert request.sampling.ignore_eos
    assert request.sampling.min_p == 0.25
    assert request.sampling.repetition_penalty == 1.5
    assert request.sampling.presence_penalty == -1
    assert request.sampling.frequency_penalty == 0.5
    assert request.sampling.logit_bias == ((7, -3.0), (258, 2.5))
    assert request.sampling.logprobs == 4
    assert request.cache_salt == "tenant"
    assert request.kv_transfer_params == params


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]], ["hi"], "hi"])
async def test_a_prompt_may_be_text_or_tokens_alone_or_in_a_list(server, says, prompt) -> None:
    server.core.script = says("ok")
    status, _, _ = await server.post(TEXT, {"model": "tiny", "prompt": prompt})
    assert status == 200
    assert server.core.requests[0].prompt_tokens == (104, 105)


async def test_by_default_an_answer_may_fill_the_context(server, says) -> None:
    server.core.script = says("ok")
    await server.post(TEXT, PROMPT)
    assert server.core.requests[0].sampling.max_tokens == 198
