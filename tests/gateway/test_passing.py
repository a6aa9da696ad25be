"""Requests that are passed on: to an engine that has the endpoint, unchanged, with true errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from policies.registry import make_policy
from prfaas.testing.gateway_setup import MODEL, gateway_settings, until
from prfaas.testing.routed_engine import RoutedEngine, routed_engine, says, streams

RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
OVERLOADED = {"error": {"message": "full", "type": "overloaded", "param": None, "code": None}}
CREATED = b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'


@dataclass(slots=True)
class Fleet:
    """A gateway before engines that have what a test gives them."""

    gateway: Gateway
    engines: list[RoutedEngine]
    client: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kind: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.client.post(path, headers=named, **kind) as response:
            if response.content_type == "application/json":
                return response.status, await response.json(), response.headers
            return response.status, await response.text(), response.headers

    async def metric(self, line: str) -> float:
        async with self.client.get("/metrics") as response:
            for each in (await response.text()).splitlines():
                if each.startswith(line + " "):
                    return float(each.rpartition(" ")[2])
        return 0.0


@asynccontextmanager
async def fleet(
    *answers: dict[str, Any],
    apis: tuple[str, ...] | None = None,
    key: str = "",
    **settings: Any,
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(routed_engine(each, key=key)) for each in answers
        ]
        listed = [
            {"name": f"d-{at}", "url": engine.url, **({"apis": apis} if apis is not None else {})}
            for at, engine in enumerate(engines)
        ]
        chosen = gateway_settings(**{"engines": listed, "peers": (), **settings})
        gateway = Gateway(chosen, make_policy(chosen.gateway.policy), None)
        await stack.enter_async_context(gateway.running())
        client = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}")
        )
        await until(lambda: all(e.probe.reachable for e in gateway.engines), "all engines")
        yield Fleet(gateway, engines, client)
        await until(lambda: not gateway.admission.in_flight, "everything to be given back")
        assert all(engine.in_flight == 0 for engine in gateway.engines)


@pytest.mark.parametrize("path", [RESPONSES, EMBEDDINGS, "/tokenize", "/detokenize"])
async def test_a_request_and_its_answer_go_through_byte_for_byte(path: str) -> None:
    async with fleet({path: says({"odd": [1.50, {"x": None}]})}) as made:
        body = b'{ "model" : "tiny", "input":"h\\u00e9", "unknown": [1.50, 1e3] }'
        status, answer, headers = await made.post(path, body, x_request_id="mine")
        assert (status, answer) == (200, {"odd": [1.5, {"x": None}]})
        seen = made.engines[0].seen[0]
        assert seen.body == body
        assert seen.headers["x-request-id"] == headers["x-request-id"] == "mine"
        assert seen.headers["traceparent"]
        api = path.rpartition("/")[2]
        line = f'prfaas_gateway_passed_requests_total{{api="{api}",status="200"}}'
        assert await made.metric(line) == 1
        async with made.client.get("/prfaas/requests/mine") as response:
            record = await response.json()
        assert (record["api"], record["engine"], record["status"]) == (api, "d-0", "200")


async def test_what_no_engine_has_is_a_404_that_says_so() -> None:
    async with fleet({EMBEDDINGS: says({})}, {}) as made:
        status, answer, _ = await made.post(RESPONSES, {"input": "hi"})
        assert status == 404
        assert answer["error"]["type"] == "not_found"
        assert answer["error"]["message"] == "no engine of this gateway has /v1/responses"
        assert not any(engine.seen for engine in made.engines)


async def test_the_engine_that_has_it_is_found_and_asked_once() -> None:
    async with fleet({}, {EMBEDDINGS: says({"data": []})}, {}) as made:
        for _ in range(5):
            assert (await made.post(EMBEDDINGS, {"input": "hi"}))[0] == 200
        assert [len(engine.seen) for engine in made.engines] == [0, 5, 0]
        assert [engine.asked for engine in made.engines] == [[EMBEDDINGS]] * 3


async def test_what_is_configured_is_not_asked_for() -> None:
    async with fleet({EMBEDDINGS: says({})}, apis=("responses",)) as made:
        assert (await made.post(EMBEDDINGS, {"input": "hi"}))[0] == 404
        assert not made.engines[0].asked
        # It was configured wrongly: the engine's own answer says so.
        status, answer, _ = await made.post(RESPONSES, {"input": "hi"})
        assert (status, answer["error"]["type"]) == (404, "not_found")


async def test_an_engine_that_loses_an_endpoint_is_found_out() -> None:
    async with fleet({EMBEDDINGS: says({})}, {EMBEDDINGS: says({})}) as made:
        assert (await made.post(EMBEDDINGS, {"input": "hi"}))[0] == 200
        for engine in made.engines[:1]:
            del engine.answers[EMBEDDINGS]
        for _ in range(4):
            assert (await made.post(EMBEDDINGS, {"input": "hi"}))[0] == 200


async def test_an_engine_that_wants_a_key_gets_the_clients() -> None:
    async with fleet({EMBEDDINGS: says({"data": []})}, key="secret") as made:
        status, _, _ = await made.post(EMBEDDINGS, {"input": "hi"})
        assert status == 401  # the engine's own
        status, _, _ = await made.post(EMBEDDINGS, {"input": "hi"}, authorization="Bearer secret")
        assert status == 200


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        (b"{", 400, "invalid_request_error", None),
        (b"[1]", 400, "invalid_request_error", None),
        ({"model": 5}, 400, "invalid_request_error", "model"),
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"stream": "yes"}, 400, "invalid_request_error", "stream"),
        ({"cache_salt": 7}, 400, "invalid_request_error", "cache_salt"),
        ({"background": True}, 400, "invalid_request_error", "background"),
        ({"previous_response_id": "r"}, 400, "invalid_request_error", "previous_response_id"),
    ],
)
async def test_what_cannot_be_honoured_names_its_field(
    body: Any, status: int, kind: str, param: str | None
) -> None:
    async with fleet({RESPONSES: says({})}, {RESPONSES: says({})}) as made:
        got, answer, _ = await made.post(RESPONSES, body)
        assert (got, answer["error"]["type"], answer["error"]["param"]) == (status, kind, param)
        assert not any(engine.seen for engine in made.engines)


async def test_one_engine_remembers_responses_itself() -> None:
    async with fleet({RESPONSES: says({"id": "r2"})}) as made:
        body = {"input": "hi", "previous_response_id": "r1"}
        assert (await made.post(RESPONSES, body))[0] == 200
        assert json.loads(made.engines[0].seen[0].body) == body


async def test_transfer_fields_are_stripped_and_salts_are_ours() -> None:
    """Cases 4 and 7."""
    async with fleet({RESPONSES: says({}), "/tokenize": says({})}) as made:
        body = {"input": "hi", "kv_transfer_params": {"transfer_id": "forged"}}
        await made.post(RESPONSES, body, x_cache_salt="theirs")
        await made.post(RESPONSES, {"input": "hi", "cache_salt": "theirs"})
        await made.post("/tokenize", {"prompt": "hi"}, x_cache_salt="theirs")
        first, second, third = (json.loads(seen.body) for seen in made.engines[0].seen)
        assert set(first) == {"input", "cache_salt"}
        assert first["cache_salt"] == second["cache_salt"] != "theirs"
        assert third == {"prompt": "hi"}
        line = 'prfaas_gateway_stripped_fields_total{field="kv_transfer_params"}'
        assert await made.metric(line) == 1


async def test_an_engine_that_cannot_now_leaves_it_to_another() -> None:
    async with fleet({EMBEDDINGS: says(OVERLOADED, 503)}, {EMBEDDINGS: says({})}) as made:
        for _ in range(6):
            assert (await made.post(EMBEDDINGS, {"input": "hi"}))[0] == 200
        retried = await made.metric(
            'prfaas_gateway_engine_retries_total{engine="d-0",reason="status_503"}'
        )
        assert retried == len(made.engines[0].seen) > 0


async def test_they_wait_for_room_as_others_do() -> None:
    async def slow(request: Any, seen: Any) -> Any:
        await gate.wait()
        return await says({})(request, seen)

    gate = asyncio.Event()
    limits = {"engine_active_requests": 1, "gateway_waiting": 1, "gateway_wait_s": 30.0}
    async with fleet({EMBEDDINGS: slow, "/tokenize": says({})}, limits=limits) as made:
        first = asyncio.create_task(made.post(EMBEDDINGS, {"input": "a"}))
        await until(lambda: made.engines[0].seen, "the first at the engine")
        second = asyncio.create_task(made.post(EMBEDDINGS, {"input": "b"}))
        turns = made.gateway.engines.turns
        assert turns is not None
        await until(lambda: turns.waiting == 1, "the second to wait")
        status, answer, _ = await made.post(EMBEDDINGS, {"input": "c"})
        assert (status, answer["error"]["type"]) == (503, "overloaded")
        assert (await made.post("/tokenize", {"prompt": "d"}))[0] == 200
        gate.set()
        assert [(await each)[0] for each in (first, second)] == [200, 200]


async def test_the_last_ones_refusal_is_answered_as_it_is() -> None:
    async with fleet({EMBEDDINGS: says(OVERLOADED, 503, **{"retry-after": "7"})}) as made:
        status, answer, headers = await made.post(EMBEDDINGS, {"input": "hi"})
        assert (status, answer, headers["retry-after"]) == (503, OVERLOADED, "7")


async def test_engines_that_only_fail_open_their_breaker() -> None:
    async with fleet({EMBEDDINGS: says({}, 500)}) as made:
        for _ in range(3):
            assert (await made.post(EMBEDDINGS, {"input": "hi"}))[0] == 500
        assert not made.gateway.engines.breakers.engines["d-0"].is_closed


async def test_events_of_a_stream_are_relayed_as_they_are() -> None:
    delta = b'event: response.output_text.delta\ndata: {"delta":"\\"type\\":\\"error\\""}\n\n'
    async with fleet({RESPONSES: streams(CREATED, delta, COMPLETED)}) as made:
        status, text, headers = await made.post(RESPONSES, {"input": "hi", "stream": True})
        assert (status, text) == (200, (CREATED + delta + COMPLETED).decode())
        assert headers["content-type"] == "text/event-stream"


async def test_a_stream_that_breaks_off_says_so() -> None:
    """Case 38."""
    async with fleet({RESPONSES: streams(CREATED)}) as made:
        status, text, _ = await made.post(RESPONSES, {"input": "hi", "stream": True})
        assert status == 200
        assert text.startswith(CREATED.decode())
        last = text.strip().rpartition("\n\n")[2]
        assert last.startswith("event: error\ndata: ")
        error = json.loads(last.partition("data: ")[2])
        assert error["type"] == "error"
        assert error["code"] == error["error"]["type"] == "engine_unavailable"


async def test_a_client_that_waits_hears_comments_and_then_why_it_failed() -> None:
    async def late(request: Any, seen: Any) -> Any:
        await asyncio.sleep(0.3)
        return await says(OVERLOADED, 503)(request, seen)

    async with fleet({RESPONSES: late}, limits={"sse_keepalive_s": 0.1}) as made:
        status, text, _ = await made.post(RESPONSES, {"input": "hi", "stream": True})
        assert status == 200
        assert text.startswith(": keepalive\n\n")
        assert json.loads(text.rpartition("data: ")[2])["message"].endswith("503: full")


@pytest.mark.parametrize("path", [RESPONSES, EMBEDDINGS])
async def test_a_client_that_leaves_stops_the_engine(path: str) -> None:
    """Case 21."""

    async def hang(request: Any, seen: Any) -> Any:
        await asyncio.Event().wait()

    answers: dict[str, Any] = {RESPONSES: streams(CREATED, hang=True), EMBEDDINGS: hang}
    async with fleet(answers) as made:
        task = asyncio.create_task(made.post(path, {"input": "hi", "stream": True}))
        await until(lambda: made.engines[0].seen, "the engine to have it")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: made.engines[0].seen[0].cancelled, "the engine to hear of it")
        api = path.rpartition("/")[2]
        line = f'prfaas_gateway_passed_requests_total{{api="{api}",status="499"}}'
        await until(lambda: not made.gateway.admission.in_flight, "the request to end")
        assert await made.metric(line) == 1


async def test_limits_hold_for_them_too() -> None:
    async with fleet(
        {EMBEDDINGS: says({})}, limits={"max_body_bytes": 100, "gateway_max_in_flight": 1}
    ) as made:
        status, answer, _ = await made.post(EMBEDDINGS, {"input": "x" * 200})
        assert (status, answer["error"]["type"]) == (413, "request_too_large")
        made.gateway.admission.enter()
        status, answer, headers = await made.post(EMBEDDINGS, {"input": "x"})
        made.gateway.admission.leave()
        assert (status, answer["error"]["type"]) == (503, "overloaded")
        assert headers["retry-after"] == "1"


async def test_the_whole_request_has_a_deadline() -> None:
    async def hang(request: Any, seen: Any) -> Any:
        await asyncio.Event().wait()

    async with fleet({EMBEDDINGS: hang}, limits={"request_timeout_s": 0.3}) as made:
        status, answer, _ = await made.post(EMBEDDINGS, {"input": "x"})
        assert (status, answer["error"]["type"]) == (502, "engine_unavailable")


async def test_models_show_what_the_engine_says_of_ours() -> None:
    async with fleet({}) as made:
        made.engines[0].card = {"id": MODEL, "object": "model", "max_model_len": 4096}
        async with made.client.get("/v1/models") as response:
            listed = await response.json()
        assert listed["data"] == [made.engines[0].card]
        async with made.client.get(f"/v1/models/{MODEL}") as response:
            assert await response.json() == made.engines[0].card
        async with made.client.get("/v1/models/gpt-9") as response:
            assert response.status == 404
            assert (await response.json())["error"]["type"] == "model_not_found"
        made.engines[0].card = {"id": "another"}
        async with made.client.get(f"/v1/models/{MODEL}") as response:
            assert (await response.json())["owned_by"] == "prfaas"
