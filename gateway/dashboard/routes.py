"""Routes of the dashboard: its page and what that needs, and the stream that keeps it alive."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable
from importlib.resources import files
from typing import Protocol

import msgspec
from aiohttp import web

from gateway.dashboard.feed import Feed, News
from gateway.dashboard.gather import Gatherer, Sources
from gateway.dashboard.latest import Latest
from gateway.dashboard.messages import Hello, State
from prfaas.errors import NotFound
from prfaas.limits import Limits

PAGE = "index.html"
STREAM_PATH = "/prfaas/dashboard/events"
"""Below `/prfaas/`, as everything that is for operators only."""
LIFE_S = 300.0
"""Then a stream ends and its page opens another, for which its key is looked at anew."""
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Nothing but what we serve ourselves runs in the page, and nobody frames it."""


class Shared(News, Protocol):
    """What all processes of a gateway have to show together."""

    def state(self) -> State: ...

    async def run(self, somebody_looks: Callable[[], bool]) -> None: ...


class Dashboard:
    """Owns the feed of one gateway: `run` it, and `close` it before the server stops."""

    def __init__(
        self,
        sources: Sources,
        limits: Limits,
        shared: Callable[[Gatherer], Shared] | None = None,
    ) -> None:
        """`shared` makes what pages are shown where this process is one of several."""
        self._limits = limits
        gatherer = Gatherer(sources)
        self._shared = None if shared is None else shared(gatherer)
        if self._shared is None:
            self.feed = Feed(gatherer.state, Latest(sources.records))
        else:
            self.feed = Feed(self._shared.state, self._shared)
        hello = Hello(
            sources.settings.model, importlib.metadata.version("prfaas"), sources.settings.offload
        )
        self._hello = b"retry: 2000\nevent: hello\ndata: %b\n\n" % msgspec.json.encode(hello)
        self._assets = {
            asset.name: (asset.read_bytes(), TYPES[suffix])
            for asset in files("gateway.dashboard").joinpath("static").iterdir()
            if (suffix := "." + asset.name.rpartition(".")[2]) in TYPES
        }

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/dashboard", self._page)
        router.add_get("/dashboard/", self._beside)
        router.add_get("/dashboard/{name}", self._asset)
        router.add_get(STREAM_PATH, self._stream)

    async def run(self) -> None:
        """Until cancelled."""
        if self._shared is None:
            await self.feed.run()
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.feed.run())
                group.create_task(self._shared.run(lambda: self.feed.watchers > 0))

    def close(self) -> None:
        self.feed.close()

    async def _page(self, request: web.Request) -> web.Response:
        return self._answer(PAGE)

    async def _beside(self, request: web.Request) -> web.Response:
        """To the page itself; relative, so that it is right behind a proxy's prefix too."""
        return web.Response(status=308, headers={"location": "../dashboard"})

    async def _asset(self, request: web.Request) -> web.Response:
        return self._answer(request.match_info["name"] or PAGE)

    def _answer(self, name: str) -> web.Response:
        found = self._assets.get(name)
        if found is None:
            raise NotFound(f"there is no /dashboard/{name[:100]}")
        body, content_type = found
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=HEADERS)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        with self.feed.watching() as watcher:
            response = web.StreamResponse(
                headers={
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-store",
                    "x-accel-buffering": "no",
                }
            )
            data: bytes | None = self._hello + self.feed.opening()
            try:
                await response.prepare(request)
                ends = asyncio.get_running_loop().time() + LIFE_S
                while data is not None and asyncio.get_running_loop().time() < ends:
                    async with asyncio.timeout(self._limits.slow_client_timeout_s):
                        await response.write(data)
                    data = await watcher.next()
                await response.write_eof()
            except TimeoutError:  # it reads nothing
                if request.transport is not None:
                    request.transport.abort()
            except ConnectionError:
                pass
            return response
