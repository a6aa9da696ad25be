"""The way to the decode engine: a small interface, and aiohttp's client behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

import aiohttp

from prfaas.errors import EngineUnavailable
from prfaas.limits import Limits

KEEPALIVE_S = 4.0
"""Idle connections are dropped before servers do it (uvicorn's default is 5 s), so that none is
used that is just being closed."""


class UpstreamResponse(Protocol):
    """An answer whose head has arrived. `headers` is case-insensitive."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body in pieces as they arrive; nothing is read ahead beyond one socket buffer.

        Raises EngineUnavailable when the connection breaks before the end.
        """
        ...

    async def read(self, limit_bytes: int) -> bytes:
        """The whole body. Raises EngineUnavailable when it breaks or is over the limit."""
        ...


class Upstream(Protocol):
    """One engine. Leaving the context early closes the connection, which the engine sees."""

    def post(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> AbstractAsyncContextManager[UpstreamResponse]: ...

    async def healthy(self, timeout_s: float) -> bool:
        """`GET /health` answers 200 in time."""
        ...


class AiohttpUpstream:
    """Owns a pool of connections to one engine; close it with `close`."""

    def __init__(self, url: str, name: str, limits: Limits) -> None:
        self._url = url.rstrip("/")
        self._name = name
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # admission bounds the requests
                keepalive_timeout=KEEPALIVE_S,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def post(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[UpstreamResponse]:
        with _translated(self._name):
            response = await self._session.post(
                self._url + path, headers=headers, data=body, allow_redirects=False
            )
        try:
            yield _AiohttpResponse(response, self._name)
        finally:
            # A body read to its end has given its connection back; any other is cut here.
            response.close()

    async def healthy(self, timeout_s: float) -> bool:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(self._url + "/health", allow_redirects=False) as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


class _AiohttpResponse:
    def __init__(self, response: aiohttp.ClientResponse, name: str) -> None:
        self._response = response
        self._name = name

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        with _translated(self._name):
            async for chunk in self._response.content.iter_any():
                yield chunk

    async def read(self, limit_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for chunk in self.chunks():
            parts.append(chunk)
            size += len(chunk)
            if size > limit_bytes:
                raise EngineUnavailable(
                    f"engine {self._name}: the answer is over {limit_bytes} bytes"
                )
        return b"".join(parts)


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """aiohttp's and the socket's exceptions as ours."""
    try:
        yield
    except aiohttp.ClientConnectorError as exc:
        raise EngineUnavailable(f"engine {name} cannot be reached", phase="connect") from exc
    except (aiohttp.ClientError, OSError, TimeoutError) as exc:
        text = str(exc) or type(exc).__name__
        raise EngineUnavailable(f"engine {name} broke off: {text}", phase="progress") from exc
