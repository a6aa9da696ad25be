"""HTTP at the edge: every error in OpenAI's shape, request ids, and the inspection pages."""

import asyncio
import json
from typing import Any

import pytest

from prfaas.telemetry import LinkLimit, WatchUpdate
from prfaas.testing.gateway_setup import MODEL, completion, link, until
from prfaas.testing.scripted_engine import Script
from prfaas.testing.waiting import eventually

SHORT = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


def assert_openai_error(answer: Any, kind: str, param: str | None = None) -> str:
    """The shape the official client parses."""
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == kind
    assert answer["error"]["param"] == param
    return answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        (b"{", 400, "invalid_request_error", None),
        (b"[]", 400, "invalid_request_error", None),
        ({"model": MODEL}, 400, "invalid_request_error", "prompt"),
        ({**SHORT, "stream": "yes"}, 400, "invalid_request_error", "stream"),
        ({**SHORT, "max_tokens": "9"}, 400, "invalid_request_error", "max_tokens"),
        ({**SHORT, "model": "gpt-9"}, 404, "model_not_found", "model"),
        ({**SHORT, "prompt": {"a": 1}, "x": "y" * 300}, 400, "invalid_request_error", "prompt"),
    ],
)
async def test_bad_requests_name_what_is_wrong(
    cluster: Any, body: Any, status: int, kind: str, param: str | None
) -> None:
    """Case 39."""
    got, answer, response = await cluster.post(body)
    assert got == status
    assert_openai_error(answer, kind, param)
    assert response.headers["x-request-id"].startswith("req-")
    assert not cluster.engine.seen


async def test_an_unknown_model_is_named_with_the_one_there_is(cluster: Any) -> None:
    _, answer, _ = await cluster.post({**SHORT, "model": "gpt-9"})
    assert answer["error"]["message"] == (
        "the model 'gpt-9' does not exist; this gateway serves 'tiny'"
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_huge_name_is_not_repeated_whole(cluster: Any, path: str) -> None:
    body = {**SHORT, "model": "m" * 100_000 + "\x1b[31m"}
    async with cluster.client.post(path, json=body) as response:
        text = await response.text()
        assert (response.status, len(text) < 1000) == (404, True)
    assert_openai_error(json.loads(text), "model_not_found", "model")


async def test_what_a_client_calls_hop_by_hop_goes_no_further(cluster: Any) -> None:
    """Nor does anything of its own that would route or promise."""
    headers = {"connection": "keep-alive, User-Agent,tracestate"}
    own = {"x-prfaas-target": "remote", "x-forwarded-for": "::1", "te": "trailers", "cookie": "a"}
    named = {"user-agent": "secret", "tracestate": "a=b", "accept": "text/plain"}
    async with cluster.client.post(
        "/v1/completions", json=SHORT, headers={**headers, **own, **named}
    ) as response:
        assert response.status == 200
    (seen,) = cluster.engine.seen
    assert seen.headers["accept"] == "text/plain"
    assert not {"tracestate", *own} & {name.lower() for name in seen.headers}
    assert "secret" not in str(seen.headers)


async def test_a_body_over_the_limit_is_a_413(make_cluster: Any) -> None:
    async with make_cluster(limits={"max_body_bytes": 1000}) as cluster:
        status, answer, _ = await cluster.post(completion("x" * 2000))
        assert status == 413
        assert "1000" in assert_openai_error(answer, "request_too_large")


async def test_a_prompt_over_the_limit_is_a_400_with_both_numbers(make_cluster: Any) -> None:
    async with make_cluster(limits={"max_prompt_tokens": 1000}) as cluster:
        status, answer, _ = await cluster.post(completion())
        assert status == 400
        message = assert_openai_error(answer, "context_length_exceeded", "prompt")
        assert "2000" in message
        assert "1000" in message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/", 404),
        ("GET", "/prfaas/requests/unknown", 404),
    ],
)
async def test_wrong_methods_and_paths(cluster: Any, method: str, path: str, status: int) -> None:
    async with cluster.client.request(method, path) as response:
        answer = await response.json()
        assert response.status == status
        if status == 405:
            assert response.headers["allow"]
            assert_openai_error(answer, "invalid_request_error")
        else:
            assert_openai_error(answer, "not_found")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-123_x.y:z", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("with space", False),
        ("<script>", False),
        ("", False),
    ],
)
async def test_request_ids_are_kept_where_valid(cluster: Any, given: str, kept: bool) -> None:
    _, _, response = await cluster.post(SHORT, x_request_id=given)
    echoed = response.headers["x-request-id"]
    assert (echoed == given) is kept
    assert cluster.engine.seen[0].headers["x-request-id"] == echoed
    assert (await cluster.record(echoed))["request_id"] == echoed


async def test_models(cluster: Any) -> None:
    status, answer = await cluster.get("/v1/models")
    assert status == 200
    assert [card["id"] for card in answer["data"]] == [MODEL]
    assert answer["object"] == "list"


async def test_ready_follows_the_engine_and_the_drain(cluster: Any) -> None:
    assert (await cluster.get("/health"))[0] == 200
    assert await cluster.get("/ready") == (200, {"status": "ready"})
    cluster.gateway.engines["d-0"].probe.reachable = False
    assert await cluster.get("/ready") == (503, {"status": "no engine is reachable"})
    cluster.gateway.admission.draining = True
    assert await cluster.get("/ready") == (503, {"status": "draining"})
    assert (await cluster.get("/health"))[0] == 200


async def test_too_many_requests_are_told_when_to_come_back(make_cluster: Any) -> None:
    async with make_cluster(limits={"gateway_max_in_flight": 1}) as cluster:
        cluster.engine.script = Script(first_delay_s=0.3)
        first = asyncio.create_task(cluster.post(SHORT))
        await until(lambda: cluster.engine.seen, "the first at the engine")
        status, answer, response = await cluster.post(SHORT)
        assert status == 503
        assert_openai_error(answer, "overloaded")
        assert response.headers["retry-after"] == "1"
        assert await cluster.metric("prfaas_gateway_refused_total", reason="full") == 1
        assert (await first)[0] == 200
        assert (await cluster.post(SHORT))[0] == 200


async def test_requests_are_listed_newest_first(cluster: Any) -> None:
    for i in range(3):
        await cluster.post(SHORT, x_request_id=f"r{i}")
    _, answer = await cluster.get("/prfaas/requests?limit=2")
    assert [record["request_id"] for record in answer["requests"]] == ["r2", "r1"]
    assert all("itl_s" not in record for record in answer["requests"])


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "1e3", "9" * 30, "²"])
async def test_a_bad_limit_is_named(cluster: Any, limit: str) -> None:
    status, answer = await cluster.get(f"/prfaas/requests?limit={limit}")
    assert status == 400
    assert_openai_error(answer, "invalid_request_error", "limit")


async def test_the_cluster_page_shows_the_snapshot(cluster: Any) -> None:
    _, answer = await cluster.get("/prfaas/cluster")
    assert answer["local"]["name"] == "d-0"
    assert answer["remotes"][0]["ready"] is True
    assert answer["feeds"][0]["connected"] is True
    assert answer["feeds"][0]["links"][0]["limit"] is None
    cluster.d.change_link(limit=LinkLimit.SENDER)
    cluster.p.push(WatchUpdate(0, False, links=(link(agent="scripted", limit=LinkLimit.LINK),)))

    async def both_views() -> bool:
        _, answer = await cluster.get("/prfaas/cluster")
        d, p = answer["feeds"]
        return [k["limit"] for k in (*d["links"], *p["served_links"])] == ["sender", "link"]

    await eventually(both_views)


async def test_records_of_running_requests_are_shown(cluster: Any) -> None:
    cluster.engine.script = Script(first_delay_s=0.3)
    task = asyncio.create_task(cluster.post(completion(), x_request_id="running"))
    await until(lambda: cluster.engine.seen, "the request at the engine")
    record = await cluster.record("running")
    assert record["decision"]["target"] == "remote"
    assert (record["status"], record["e2e_s"]) == (None, None)
    await task


async def raw(cluster: Any, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.gateway.port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


async def test_bytes_that_are_not_http_are_refused(cluster: Any) -> None:
    assert (await raw(cluster, b"\x00\xff\x16\x03\r\n\r\n")).startswith(b"HTTP/1.0 400")
    assert (await cluster.post(SHORT))[0] == 200


async def test_headers_of_any_bytes_are_a_salt_or_a_400_and_never_an_error_of_ours(
    cluster: Any,
) -> None:
    body = json.dumps({**SHORT, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    length = b"content-length: %d\r\n\r\n" % len(body)
    for salt in (b"\xff\xfe", b"\xff\xfd"):
        answer = await raw(cluster, head + b"x-cache-salt: " + salt + b"\r\n" + length + body)
        assert answer.startswith(b"HTTP/1.1 200")
    first, second = (request.body["cache_salt"] for request in cluster.engine.seen)
    assert first != second
    for name in (b"user-agent", b"authorization", b"accept", b"tracestate"):
        answer = await raw(cluster, head + name + b": \xff\r\n" + length + body)
        assert answer.startswith(b"HTTP/1.1 400")
        assert name in answer
    assert len(cluster.engine.seen) == 2


async def test_a_broken_stream_closes_the_connection(cluster: Any) -> None:
    """Case 38: read until the end of the connection, there is an error and no [DONE]."""
    cluster.engine.script = Script(stop_after=1, then="cut")
    body = json.dumps({**SHORT, "stream": True}).encode()
    answer = await raw(
        cluster,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body,
    )
    assert b"[DONE]" not in answer
    assert answer.rstrip().endswith(b"\r\n0")
    assert b'data: {"error":' in answer


async def test_a_body_that_breaks_off_costs_nothing(cluster: Any) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.gateway.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
    await until(lambda: cluster.gateway.admission.in_flight == 1, "the request to begin")
    writer.close()
    await until(lambda: cluster.gateway.admission.in_flight == 0, "the request to end")


async def test_a_body_that_never_comes_is_not_waited_for(make_cluster: Any) -> None:
    async with make_cluster(limits={"slow_client_timeout_s": 0.2}) as cluster:
        answer = await raw(
            cluster, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{"
        )
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"did not arrive in time" in answer


async def test_64_keep_alive_clients_in_a_burst_all_get_answers(cluster: Any) -> None:
    cluster.engine.script = Script(first_delay_s=0.02)
    for _ in range(2):
        results = await asyncio.gather(*(cluster.post(SHORT) for _ in range(64)))
        assert {status for status, _, _ in results} == {200}
