"""A real server on loopback over an engine whose every event a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from local_engine.http.app import build_app
from local_engine.http.state import ServerState, Serving
from local_engine.metrics import EngineMetrics
from local_engine.requests import EngineRequest, EngineStats, FinishReason, TokenEvent
from prfaas.errors import PrfaasError
from prfaas.limits import Limits
from prfaas.tokens import Tokenizer

MAX_CONTEXT = 200
BYTE_TOKENIZER = Path(__file__).parents[3] / "deploy" / "profiles" / "byte-tokenizer"
Script = list[TokenEvent | float]


class ScriptedStream:
    """Plays events; a number between them waits so many seconds (`inf`: until closed)."""

    def __init__(self, engine: ScriptedCore, script: Script) -> None:
        self._engine = engine
        self._script = list(script)
        self.closed = False

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self.closed:
            raise StopAsyncIteration
        while self._script:
            item = self._script.pop(0)
            if isinstance(item, TokenEvent):
                return item
            await (asyncio.sleep(item) if item != float("inf") else asyncio.Event().wait())
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            self._engine.live -= 1


@dataclass
class ScriptedCore:
    """Stands in for the engine: answers each request with `script`, or fails it with `refuse`."""

    script: Script = field(default_factory=list)
    refuse: PrfaasError | None = None
    requests: list[EngineRequest] = field(default_factory=list)
    streams: list[ScriptedStream] = field(default_factory=list)
    live: int = 0
    broken_pool: str = ""
    resets: int = 0
    healthy: bool = True
    submitted: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, request: EngineRequest) -> ScriptedStream:
        self.requests.append(request)
        self.submitted.set()
        if self.refuse is not None:
            raise self.refuse
        self.live += 1
        self.streams.append(ScriptedStream(self, self.script))
        return self.streams[-1]

    def stats(self) -> EngineStats:
        return EngineStats(running=self.live, free_blocks=6, total_blocks=8, prompt_tokens=5)

    async def check_integrity(self) -> None:
        if self.broken_pool:
            raise AssertionError(self.broken_pool)

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def wait_idle(self, timeout_s: float = 2.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.live:
            assert time.monotonic() < deadline, f"{self.live} requests still live"
            await asyncio.sleep(0.005)


@dataclass
class Server:
    """The running server as a test sees it."""

    url: str
    state: ServerState
    serving: Serving
    core: ScriptedCore
    client: aiohttp.ClientSession
    sockets: list[socket.socket]
    """The server's end of every answer's connection."""

    async def post(
        self, path: str, body: dict[str, Any] | None = None, **kwargs: Any
    ) -> tuple[int, Any, Any]:
        """(status, JSON, headers)."""
        if body is not None:
            kwargs["json"] = body
        async with self.client.post(self.url + path, **kwargs) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str) -> tuple[int, Any, Any]:
        async with self.client.get(self.url + path) as response:
            if response.content_type == "application/json":
                return response.status, await response.json(), response.headers
            return response.status, await response.text(), response.headers

    async def stream(self, path: str, body: dict[str, Any]) -> list[bytes]:
        """The `data:` of every event of a streamed answer."""
        async with self.client.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            raw = await response.read()
        events = raw.split(b"\n\n")
        assert events.pop() == b""
        assert all(event.startswith(b"data: ") for event in events)
        return [event.removeprefix(b"data: ") for event in events]


ServerFactory = Callable[..., AbstractAsyncContextManager[Server]]


def _says(text: str, reason: FinishReason = FinishReason.STOP, cached: int = 0) -> Script:
    events: Script = [TokenEvent((b,), cached_tokens=cached) for b in text.encode()]
    if reason is FinishReason.STOP:
        return [*events, TokenEvent((258,), finish_reason=reason, cached_tokens=cached)]
    return [*events, TokenEvent((), finish_reason=reason, cached_tokens=cached)]


@pytest.fixture
def says() -> Callable[..., Script]:
    """The script of an answer, a token a byte, one event each; `stop` adds the end token."""
    return _says


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Token id = byte; 257 begins and 258 ends a message."""
    return Tokenizer.load(BYTE_TOKENIZER)


@pytest.fixture
def serve(byte_tokenizer: Tokenizer) -> ServerFactory:
    @asynccontextmanager
    async def start(
        *, ready: bool = True, send_buffer_bytes: int = 0, **limits: Any
    ) -> AsyncIterator[Server]:
        core = ScriptedCore()
        state = ServerState(Limits(**limits))
        metrics = EngineMetrics("tiny", core.stats, version="0")
        serving = Serving(
            engine=core,  # type: ignore[arg-type]
            tokenizer=byte_tokenizer,
            metrics=metrics,
            model_name="tiny",
            max_context=MAX_CONTEXT,
            vocab_size=259,
            system_fingerprint="fp",
            created=1,
        )
        if ready:
            state.become_ready(serving)
        app = build_app(state, debug_endpoints=True)
        sockets: list[socket.socket] = []

        async def keep_socket(request: web.Request, response: web.StreamResponse) -> None:
            assert request.transport is not None
            sockets.append(request.transport.get_extra_info("socket"))

        app.on_response_prepare.append(keep_socket)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        await web.SockSite(runner, listener).start()
        port = listener.getsockname()[1]
        try:
            async with aiohttp.ClientSession() as client:
                yield Server(f"http://127.0.0.1:{port}", state, serving, core, client, sockets)
        finally:
            await runner.cleanup()
            state.close()

    return start


@pytest.fixture
async def server(serve: ServerFactory) -> AsyncIterator[Server]:
    async with serve() as running:
        yield running


@pytest.fixture
def gone() -> Callable[[Server, str, dict[str, Any], float], Awaitable[None]]:
    """Send a request and hang up after so many seconds."""

    async def hang_up(server: Server, path: str, body: dict[str, Any], after_s: float) -> None:
        async def ask() -> None:
            async with server.client.post(server.url + path, json=body) as response:
                await response.read()

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ask(), after_s)

    return hang_up
