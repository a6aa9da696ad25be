from __future__ import annotations

CHAT = "/v1/chat/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


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
