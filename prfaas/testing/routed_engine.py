"""An engine on loopback that has exactly the endpoints a test gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answerer = Callable[[web.Request, "SeenPost"], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class SeenPost:
    """One request to one of its endpoints, and what became of it."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    finished: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class RoutedEngine:
    """What one server has seen; `answers` by path may be changed while it runs."""

    answers: dict[str, Answerer]
    url: str = ""
    seen: list[SeenPost] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Paths of questions whether there is such an endpoint."""
    card: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    """A bearer token without which nothing under /v1 answers."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/health":
            return web.Response()
        if (
            self.key
            and path.startswith("/v1")
            and request.headers.get("authorization") != f"Bearer {self.key}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if path == "/v1/models" and self.card:
            return web.json_response({"object": "list", "data": [self.card]})
        answer = self.answers.get(path)
        if request.method != "POST":
            self.asked.append(path)
            return web.json_response({"detail": "Not Found"}, status=404 if answer is None else 405)
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        seen = SeenPost(path, request.headers.copy(), await request.read())
        self.seen.append(seen)
        try:
            response = await answer(request, seen)
            seen.finished = True
            return response
        except (asyncio.CancelledError, ConnectionError):
            seen.cancelled = True
            raise


@asynccontextmanager
async def routed_engine(
    answers: Mapping[str, Answerer] | None = None, *, keepalive_s: float = 75.0, **fields: Any
) -> AsyncIterator[RoutedEngine]:
    """A running RoutedEngine on a free loopback port. It closes what is idle for `keepalive_s`."""
    engine = RoutedEngine(dict(answers or {}), **fields)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(
        app, handler_cancellation=True, shutdown_timeout=0.1, keepalive_timeout=keepalive_s
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        engine.url = f"http://{host}:{port}"
        yield engine
    finally:
        await runner.cleanup()


def says(answer: Any, status: int = 200, **headers: str) -> Answerer:
    """Always the same JSON."""

    async def respond(request: web.Request, seen: SeenPost) -> web.StreamResponse:
        return web.json_response(answer, status=status, headers=headers)

    return respond


def streams(*events: bytes, hang: bool = False) -> Answerer:
    """Always the same events; then the end, or silence until the client leaves."""

    async def respond(request: web.Request, seen: SeenPost) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        if hang:
            await asyncio.Event().wait()
        return response

    return respond
