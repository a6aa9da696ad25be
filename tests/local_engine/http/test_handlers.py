from __future__ import annotations

import json
import socket

import pytest

from local_engine.requests import FinishReason, TokenEvent
from prfaas.errors import EngineUnavailable, Overloaded, PrefillUnavailable

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


async def test_without_include_usage_no_chunk_mentions_usage(server, says) -> None:
    server.core.script = says("ok")
    events = await server.stream(TEXT, PROMPT)
    assert events.pop() == b"[DONE]"
    chunks = [json.loads(event) for event in events]
    assert all("usage" not in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ok"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("full", retry_after_s=2.2), 503),
        (PrefillUnavailable("no peer"), 503),
        (EngineUnavailable("gone"), 503),
        (PrefillUnavailable("no peer", retry_after_s=7), 503),
    ],
    ids=["overloaded", "prefill", "engine", "prefill-7"],
)
@pytest.mark.parametrize("when", ["submit", "event"])
async def test_a_failure_before_the_first_token_has_its_true_status(
    server, stream, error, status, when
) -> None:
    if when == "submit":
        server.core.refuse = error
    else:
        server.core.script = [TokenEvent((), error=error)]
    got, body, headers = await server.post(CHAT, {**HI, "stream": stream})
    assert got == status
    assert body["error"]["type"] == error.kind
    assert body["error"]["message"] == error.message
    assert headers["Content-Type"] == "application/json"
    expected = {2.2: "3", 7: "7", None: "1"}[error.retry_after_s]
    assert headers["Retry-After"] == expected
    await server.core.wait_idle()


async def test_a_failure_after_the_first_token_is_an_event_and_no_done(server) -> None:
    error = EngineUnavailable("the engine broke")
    server.core.script = [TokenEvent(tuple(b"a")), TokenEvent((), error=error)]
    events = await server.stream(CHAT, HI)
    assert json.loads(events[-1])["error"]["message"] == "the engine broke"
    assert b"[DONE]" not in events
    await server.core.wait_idle()


async def test_an_engine_that_falls_silent_is_an_error_not_a_short_answer(server) -> None:
    server.core.script = [TokenEvent(tuple(b"a"))]
    events = await server.stream(CHAT, HI)
    assert json.loads(events[-1])["error"]["type"] == "engine_unavailable"
    status, body, _ = await server.post(CHAT, HI)
    assert (status, body["error"]["type"]) == (503, "engine_unavailable")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_exception_is_a_500_that_tells_nothing(server, stream, caplog) -> None:
    server.core.script = [TokenEvent(("not a token",))]
    status, body, _ = await server.post(CHAT, {**HI, "stream": stream})
    assert status == 500
    assert body["error"]["type"] == "internal_error"
    assert "not a token" not in json.dumps(body)
    assert "failed" in caplog.text
    await server.core.wait_idle()


async def test_an_unexpected_exception_in_a_stream_is_an_error_event(server, caplog) -> None:
    server.core.script = [TokenEvent(tuple(b"a")), TokenEvent(("x",))]
    events = await server.stream(CHAT, HI)
    assert json.loads(events[-1])["error"]["type"] == "internal_error"
    assert "stream failed" in caplog.text


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


async def test_a_client_that_reads_nothing_is_dropped_and_others_are_not_slowed(serve) -> None:
    async with serve(slow_client_timeout_s=0.2, send_buffer_bytes=4096) as server:
        server.core.script = [TokenEvent(tuple(b"x" * 20_000)) for _ in range(40)]
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            body = json.dumps({**HI, "stream": True}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            await server.core.submitted.wait()
            server.core.script = [TokenEvent((258,), finish_reason=FinishReason.STOP)]
            status, _, _ = await server.post(CHAT, HI)
            assert status == 200
            assert not server.core.streams[0].closed
            await server.core.wait_idle()
        assert server.core.streams[0]._script, "events beyond the buffers must not be taken"


async def test_tokens_leave_without_delay(server) -> None:
    """Small writes must not wait for acknowledgements (Nagle)."""
    server.core.script = [TokenEvent((258,), finish_reason=FinishReason.STOP)]
    await server.stream(CHAT, HI)
    assert server.sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("sent", "kept"), [("trace-1:a/b", True), ("bad id", False), ("x" * 200, False), ("", False)]
)
async def test_a_sane_request_id_is_kept_and_always_echoed(server, says, sent, kept) -> None:
    server.core.script = says("ok")
    _, answer, headers = await server.post(CHAT, HI, headers={"X-Request-Id": sent})
    echoed = headers["X-Request-Id"]
    assert (echoed == sent) is kept
    assert echoed
    assert answer["id"] == f"chatcmpl-{echoed}"
    _, _, headers = await server.post(CHAT, {}, headers={"X-Request-Id": sent})
    assert (headers["X-Request-Id"] == sent) is kept


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
        "stop_token_ids": [1, 2], "ignore_eos": True, "cache_salt": "tenant",
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
    (TEXT, {"prompt": "x", "logprobs": 0}, "invalid_request_error", "logprobs"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "invalid_request_error", "suffix"),
    (TEXT, {"prompt": "x", "best_of": 2}, "invalid_request_error", "best_of"),
    (TEXT, {"prompt": "x", "kv_transfer_params": 3}, "invalid_request_error", "kv_transfer_params"),
    (TEXT, {"prompt": "x", "unheard_of": 1}, "invalid_request_error", "unheard_of"),
    (TEXT, {"prompt": "x", "stream_options": {}}, "invalid_request_error", "stream_options"),
    (CHAT, {"messages": []}, "invalid_request_error", "messages"),
    (CHAT, {"messages": "hi"}, "invalid_request_error", "messages"),
    (CHAT, {**HI, "n": 2}, "invalid_request_error", "n"),
    (CHAT, {**HI, "tools": [{"type": "function"}]}, "invalid_request_error", "tools"),
    (CHAT, {**HI, "tool_choice": "required"}, "invalid_request_error", "tool_choice"),
    (CHAT, {**HI, "logprobs": True}, "invalid_request_error", "logprobs"),
    (CHAT, {**HI, "logit_bias": {"5": 1}}, "invalid_request_error", "logit_bias"),
    (CHAT, {**HI, "presence_penalty": 0.1}, "invalid_request_error", "presence_penalty"),
    (CHAT, {**HI, "frequency_penalty": 1}, "invalid_request_error", "frequency_penalty"),
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
        {**HI, "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "invalid_request_error",
        "stream_options.continuous_usage_stats",
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
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        "invalid_request_error",
        "messages[0].role",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "invalid_request_error",
        "messages[0].tool_calls",
    ),
    (
        CHAT,
        {"messages": [{"role": "user"}]},
        "invalid_request_error",
        "messages[0].content",
    ),
    ("/tokenize", {}, "invalid_request_error", "prompt"),
    ("/tokenize", {"prompt": "x", "messages": []}, "invalid_request_error", "prompt"),
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
    ],
)
async def test_fields_that_ask_for_no_change_pass(server, says, fields) -> None:
    server.core.script = says("ok")
    status, answer, _ = await server.post(CHAT, {**HI, **fields})
    assert status == 200, answer


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nonsense", b'{"model": NaN}', b"\xff\xfe"])
async def test_a_body_that_is_no_json_object_is_a_400(server, body) -> None:
    status, answer, _ = await server.post(CHAT, data=body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_nested_without_end_is_a_400(server) -> None:
    body = b'{"messages":[],"tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    status, answer, _ = await server.post(CHAT, data=body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_over_the_limit_is_a_413_declared_or_not(serve) -> None:
    async def trickle():
        for _ in range(10):
            yield b"x" * 200

    async with serve(max_body_bytes=1000) as server:
        for data in (b"x" * 2000, trickle()):
            status, answer, _ = await server.post(CHAT, data=data)
            assert (status, answer["error"]["type"]) == (413, "request_too_large")


async def test_an_unknown_model_is_a_404_model_not_found(server) -> None:
    for path, body in ((CHAT, HI), (TEXT, PROMPT), ("/tokenize", PROMPT)):
        status, answer, _ = await server.post(path, {**body, "model": "other"})
        assert status == 404
        assert answer["error"]["code"] == "model_not_found"
        assert answer["error"]["param"] == "model"
        assert "`other`" in answer["error"]["message"]


async def test_unknown_paths_and_methods_are_errors_in_openai_shape(server) -> None:
    status, answer, _ = await server.post("/v1/nothing", {})
    assert (status, answer["error"]["type"]) == (404, "not_found")
    status, answer, headers = await server.get(CHAT)
    assert (status, answer["error"]["type"]) == (405, "not_found")
    assert headers["Allow"] == "POST"


async def test_models_are_listed_and_found_by_name(server) -> None:
    status, answer, _ = await server.get("/v1/models")
    assert status == 200
    assert answer["object"] == "list"
    (card,) = answer["data"]
    assert card["id"] == "tiny"
    assert card["max_model_len"] == 200
    assert card["owned_by"] == "prfaas"
    assert (await server.get("/v1/models/tiny"))[1] == card
    assert (await server.get("/v1/models/other"))[1]["error"]["code"] == "model_not_found"


async def test_tokenize_says_what_the_engine_would_prefill(server, says) -> None:
    _, answer, _ = await server.post("/tokenize", {"prompt": "hé"})
    assert answer == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 200}
    _, answer, _ = await server.post("/tokenize", {"messages": HI["messages"]})
    server.core.script = says("ok")
    await server.post(CHAT, HI)
    assert tuple(answer["tokens"]) == server.core.requests[0].prompt_tokens
    _, text, _ = await server.post("/detokenize", {"tokens": answer["tokens"]})
    assert text["prompt"].startswith("<|im_start|>user\nhi")


async def test_a_long_text_is_tokenised_off_the_loop_and_the_same(server) -> None:
    text = "long text " * 1000
    _, answer, _ = await server.post("/tokenize", {"prompt": text})
    assert bytes(answer["tokens"]).decode() == text


async def test_too_many_texts_at_once_get_503(serve) -> None:
    async with serve(engine_max_waiting=1) as server:
        server.state._texts_waiting = 1
        status, answer, _ = await server.post("/tokenize", {"prompt": "x" * 5000})
        assert (status, answer["error"]["type"]) == (503, "overloaded")
        status, _, _ = await server.post("/tokenize", {"prompt": "short"})
        assert status == 200
        server.state._texts_waiting = 0


async def test_loading_and_draining_servers_are_alive_not_ready_and_say_so(serve) -> None:
    async with serve(ready=False) as server:
        assert (await server.get("/health"))[0] == 200
        status, answer, _ = await server.get("/ready")
        assert (status, answer["status"]) == (503, "loading")
        status, answer, headers = await server.post(CHAT, HI)
        assert (status, answer["error"]["type"]) == (503, "engine_unavailable")
        assert headers["Retry-After"] == "1"
        assert (await server.get("/metrics"))[0] == 503

        server.state.become_ready(server.serving)
        assert (await server.get("/ready"))[0] == 200

        server.state.become_draining()
        status, answer, _ = await server.get("/ready")
        assert (status, answer["status"]) == (503, "draining")
        assert (await server.post(CHAT, HI))[0] == 503
        assert (await server.get("/v1/models"))[0] == 200


async def test_a_server_whose_engine_failed_is_neither_alive_nor_ready(server) -> None:
    assert (await server.get("/health"))[0] == 200
    server.core.healthy = False
    assert (await server.get("/health"))[0] == 503
    status, answer, _ = await server.get("/ready")
    assert (status, answer["status"]) == (503, "broken")


async def test_integrity_answers_with_counts_or_with_what_is_wrong(server) -> None:
    status, answer, _ = await server.get("/debug/integrity")
    assert status == 200
    assert answer["ok"] is True
    assert (answer["free_blocks"], answer["total_blocks"]) == (6, 8)
    server.core.broken_pool = "block 3 has two owners"
    status, answer, _ = await server.get("/debug/integrity")
    assert (status, answer["problem"]) == (500, "block 3 has two owners")


async def test_the_prefix_cache_can_be_reset(server) -> None:
    async with server.client.post(server.url + "/debug/reset_prefix_cache") as response:
        assert response.status == 200
    assert server.core.resets == 1


async def test_metrics_have_vllm_names_and_count_what_happened(server, says) -> None:
    server.core.script = says("ok")
    await server.post(CHAT, HI)
    status, page, headers = await server.get("/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    label = '{engine="0",model_name="tiny"}'
    assert f"vllm:kv_cache_usage_perc{label} 0.25" in page
    assert f"vllm:prompt_tokens_total{label} 5.0" in page
    assert f"vllm:time_to_first_token_seconds_count{label} 1.0" in page
    assert f"vllm:inter_token_latency_seconds_count{label} 2.0" in page
    assert f"vllm:e2e_request_latency_seconds_count{label} 1.0" in page
    assert '"stop",model_name="tiny"} 1.0' in page
