"""vLLM's HTTP API: what is asked of it, what its errors mean, and that leaving aborts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from prfaas.errors import (
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PrfaasError,
    Unauthorized,
    UnknownModel,
)
from prfaas.settings import VllmSettings
from prfaas.testing.waiting import eventually
from remote_prefill.vllm_api import EXPORT_PARAM, VllmApi

TOKENS = np.arange(5, dtype="<i4").tobytes()
KNOWN = {"choices": [{}], "kv_transfer_params": {EXPORT_PARAM: {"known": True}}}
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """A scripted vLLM on loopback."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.status, self.answer = 200, json.dumps(KNOWN)
        self.hold: asyncio.Event | None = None
        self.aborted = 0
        self.named: set[str] | None = set()
        self.asked: list[list[str]] = []
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/metrics", self._get)
        app.router.add_get("/metrics/", self._select)
        app.router.add_get("/health", self._get)
        self.runner = web.AppRunner(app, handler_cancellation=True)

    async def start(self) -> str:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(request.headers.get("Authorization"))
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        return web.Response(status=self.status, text=self.answer)

    async def _get(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers.get("Authorization"))
        return web.Response(status=self.status, text=self.answer)

    async def _select(self, request: web.Request) -> web.Response:
        names = request.query.getall("name[]")
        self.asked.append(names)
        if self.named is None:
            return web.Response(status=404)
        return web.Response(text="".join(f"{n} 1\n" for n in names if n in self.named))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    yield made
    await made.runner.cleanup()


@pytest.fixture
async def api(server: Server) -> AsyncIterator[VllmApi]:
    made = VllmApi(VllmSettings(url=f"{await server.start()}/", api_key="secret"))
    yield made
    await made.close()


async def test_a_prefill_asks_for_one_token_under_the_session_s_key(
    api: VllmApi, server: Server
) -> None:
    export = {"session": "x1", "epoch": 2}
    await api.prefill("m", TOKENS, salt="s", export=export)
    (body,) = server.bodies
    assert body == {
        "model": "m", "prompt": [0, 1, 2, 3, 4], "max_tokens": 1, "temperature": 0.0,
        "ignore_eos": True, "cache_salt": "s", "kv_transfer_params": {EXPORT_PARAM: export},
    }  # fmt: skip
    assert server.headers == ["Bearer secret"]


async def test_without_a_salt_none_is_sent_and_the_probe_has_one_of_its_own(
    api: VllmApi, server: Server
) -> None:
    await api.prefill("m", TOKENS)
    await api.prefill("m", TOKENS, use_cache=False)
    await api.prefill("m", TOKENS, use_cache=False)
    assert "cache_salt" not in server.bodies[0]
    salts = {body["cache_salt"] for body in server.bodies[1:]}
    assert len(salts) == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidRequest), (401, Unauthorized), (404, UnknownModel), (422, InvalidRequest),
        (429, Overloaded), (500, EngineUnavailable), (503, Overloaded),
    ],
)  # fmt: skip
async def test_errors_come_out_as_ours(
    api: VllmApi, server: Server, status: int, error: type[PrfaasError]
) -> None:
    server.status, server.answer = status, json.dumps({"error": {"message": "the reason"}})
    with pytest.raises(error, match="the reason"):
        await api.prefill("m", TOKENS)
    server.answer = "<html>not json"
    with pytest.raises(error):
        await api.metrics()
    assert not await api.healthy()


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{}]},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {EXPORT_PARAM: {"known": False}}},
        [1],
    ],
)
async def test_a_server_that_is_not_the_engine_on_the_port_is_found_out(
    api: VllmApi, server: Server, answer: Any
) -> None:
    server.answer = json.dumps(answer)
    await api.prefill("m", TOKENS)
    with pytest.raises(EngineUnavailable, match="not the engine on the port"):
        await api.prefill("m", TOKENS, export={"session": "x1", "epoch": 1})


async def test_cancelling_aborts_the_request_at_vllm(api: VllmApi, server: Server) -> None:
    server.hold = asyncio.Event()
    task = asyncio.create_task(api.prefill("m", TOKENS))
    await eventually(lambda: server.bodies)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: server.aborted == 1)


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    api = VllmApi(VllmSettings(url="http://127.0.0.1:9"))
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        await api.prefill("m", TOKENS)
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        await api.metrics()
    assert not await api.healthy()
    await api.close()


async def test_only_the_metrics_that_are_read_are_asked_for(api: VllmApi, server: Server) -> None:
    server.named = {"vllm:num_requests_running", "vllm:other"}
    names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    assert await api.metrics(names) == "vllm:num_requests_running 1\n"
    assert server.asked == [list(names)]


@pytest.mark.parametrize("named", [set(), None])
async def test_a_vllm_that_cannot_tell_metrics_apart_is_asked_for_all(
    api: VllmApi, server: Server, named: set[str] | None
) -> None:
    server.named = named
    server.answer = "everything 1\n"
    for _ in range(2):
        assert await api.metrics(("vllm:num_requests_running",)) == server.answer
    assert len(server.asked) == 1


async def test_a_prefill_does_not_meet_a_connection_that_vllm_is_closing() -> None:
    """vLLM's server may close an idle connection while the next request already lies in it."""
    served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(KNOWN).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        served += 1
        await reader.read(1)  # The next request, or the end: not a word to either.
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    api = VllmApi(VllmSettings(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    for _ in range(3):
        await api.prefill("m", b"")
    assert served == 3
    await api.close()
    server.close()
    await server.wait_closed()
