from __future__ import annotations

import json

from local_engine.requests import FinishReason

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "tiny", "prompt": "hi"}


async def test_a_chat_is_answered_in_openai_shape(server, says) -> None:
    server.core.script = says("Hello", cached=3)
    status, answer, _ = await server.post(CHAT, HI)
    assert status == 200
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["system_fingerprint"] == "fp"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt_tokens = len(server.core.requests[0].prompt_tokens)
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 6,
        "total_tokens": prompt_tokens + 6,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_a_completion_is_answered_in_openai_shape(server, says) -> None:
    server.core.script = says("Hello", FinishReason.LENGTH)
    status, answer, _ = await server.post(TEXT, {**PROMPT, "max_tokens": 5})
    assert status == 200
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert server.core.requests[0].prompt_tokens == tuple(b"hi")


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_done(server, says) -> None:
    server.core.script = says("né")
    events = await server.stream(CHAT, {**HI, "stream_options": {"include_usage": True}})
    assert events.pop() == b"[DONE]"
    chunks = [json.loads(event) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta.get("content") for delta in deltas[1:]] == ["n", "é", None]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"]


async def test_the_usage_so_far_comes_with_every_event_where_it_is_asked_for(server, says) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in ((CHAT, HI), (TEXT, PROMPT)):
        server.core.script = says("né")
        events = await server.stream(path, {**body, "stream_options": both})
        assert events.pop() == b"[DONE]"
        usages = [json.loads(event)["usage"] for event in events]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, 4)
        assert all(usage["prompt_tokens"] == usages[-1]["prompt_tokens"] for usage in usages)
        server.core.script = says("ok")
        alone = {"continuous_usage_stats": True}
        events = await server.stream(path, {**body, "stream_options": alone})
        assert all(b'"usage"' not in event for event in events)


async def test_without_include_usage_no_chunk_mentions_usage(server, says) -> None:
    server.core.script = says("ok")
    events = await server.stream(TEXT, PROMPT)
    assert events.pop() == b"[DONE]"
    chunks = [json.loads(event) for event in events]
    assert all("usage" not in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ok"


async def test_token_ids_come_when_asked_for_and_not_otherwise(server, says) -> None:
    for path, body in ((CHAT, HI), (TEXT, PROMPT)):
        server.core.script = says("ok")
        status, plain, _ = await server.post(path, body)
        assert status == 200
        assert "token_ids" not in plain["choices"][0]
        server.core.script = says("ok")
        _, answer, _ = await server.post(path, {**body, "return_token_ids": True})
        assert bytes(answer["choices"][0]["token_ids"][:2]) == b"ok"
        assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]


async def test_token_ids_of_a_stream_are_refused_by_name(server) -> None:
    body = {**PROMPT, "return_token_ids": True, "stream": True}
    status, answer, _ = await server.post(TEXT, body)
    assert (status, answer["error"]["param"]) == (400, "return_token_ids")
