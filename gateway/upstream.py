"""The way to the decode engine: a small interface, and pooled raw connections behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol

from gateway.events import Channel
from gateway.http1 import Headers, RequestLine
from gateway.http_connection import Broken, Connection, Taker
from gateway.http_pool import Address, Pool
from prfaas.errors import EngineUnavailable, PrfaasError
from prfaas.limits import Limits
from prfaas.settings import EngineEndpoint

CLOSED_WHILE_IDLE_S = 1.0
"""A connection that had been idle and ends this soon after a request, without a byte, was being
closed when the request left: the engine never read it."""


_NO_HEADERS = Headers({})


class UpstreamResponse(Protocol):
    """An answer whose head has arrived. `headers` is case-insensitive."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def ended(self) -> bool:
        """All of the body has come, and whoever follows it or took a piece has the last of it."""
        ...

    async def next_piece(self) -> bytes:
        """What arrived of the body since the last call; empty at its end. Nothing is read ahead
        beyond one socket buffer.

        Raises EngineUnavailable when the connection breaks before the end.
        """
        ...

    async def follow(self, taker: Taker, channel: Channel | None = None) -> None:
        """`taker` gets each piece as soon as it arrives, until it returns True, raises, or the body
        ends or breaks, which `next_piece` tells then. What `channel` takes does not come to it.

        Raises what the two raise.
        """
        ...

    async def read(self, limit_bytes: int) -> bytes:
        """The whole body. Raises EngineUnavailable when it breaks or is over the limit."""
        ...


class Upstream(Protocol):
    """One engine. Leaving the context early closes the connection, which the engine sees."""

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AbstractAsyncContextManager[UpstreamResponse]: ...

    def post(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> AbstractAsyncContextManager[UpstreamResponse]: ...

    async def healthy(self, timeout_s: float) -> bool:
        """`GET /health` answers 200 in time."""
        ...


class HttpUpstream:
    """Owns a pool of connections to one engine; close it with `close`."""

    def __init__(self, url: str, name: str, limits: Limits, api_key: str = "") -> None:
        """`api_key` is sent in place of what clients send for `Authorization`."""
        self._own = {"authorization": f"Bearer {api_key}"} if api_key else None
        self._address = Address.of_url(url)
        self._name = name
        self._lines: dict[tuple[str, str], RequestLine] = {}
        self.pool = Pool(self._address, name, limits)

    @staticmethod
    def to(endpoint: EngineEndpoint, limits: Limits) -> HttpUpstream:
        """The way to an engine of the settings."""
        key = endpoint.api_key.get_secret_value() if endpoint.api_key is not None else ""
        return HttpUpstream(endpoint.url, endpoint.name, limits, key)

    async def close(self) -> None:
        await self.pool.close()

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """One exchange; enter it to send, leave it to give the connection back or cut it.

        Raises InvalidRequest, and on entering EngineUnavailable (phases `connect`, `send`,
        `progress`) and Overloaded.
        """
        line = self._lines.get((method, path)) or self._line(method, path)
        if self._own is not None:
            headers = {**headers, **self._own}
        return _Exchange(self.pool, self._name, method, line.head(headers, len(body)), body)

    def _line(self, method: str, path: str) -> RequestLine:
        """Kept for the next time: the paths we ask for are few."""
        line = RequestLine(method, self._address.prefix + path, self._address.authority)
        self._lines[(method, path)] = line
        return line

    def post(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        return self.request("POST", path, headers, body)

    async def healthy(self, timeout_s: float) -> bool:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.request("GET", "/health", {}) as response,
            ):
                await response.read(1 << 20)
                return response.status == 200
        except (PrfaasError, TimeoutError):
            return False


class _Exchange:
    """One request and its answer. Holds a connection while it is entered."""

    __slots__ = (
        "_body",
        "_connection",
        "_head",
        "_method",
        "_name",
        "_pool",
        "headers",
        "status",
    )

    def __init__(self, pool: Pool, name: str, method: str, head: bytes, body: bytes) -> None:
        self._pool = pool
        self._name = name
        self._method = method
        self._head = head
        self._body = body
        self._connection: Connection | None = None
        self.status = 0
        self.headers: Mapping[str, str] = _NO_HEADERS

    async def __aenter__(self) -> _Exchange:
        pool = self._pool
        used = pool.take_idle()
        while True:
            connection = used or await pool.connect()
            try:
                connection.send(self._method, self._head, self._body, pool.at_work)
                head = None
                while head is None:
                    await connection.more()
                    head = connection.head()
            except Broken as exc:
                pool.give_back(connection)
                closed = exc.unheard and exc.phase == "progress"
                if used is None or not closed or used.still_s > CLOSED_WHILE_IDLE_S:
                    raise self._translated(exc) from exc
                used = None
            except BaseException:
                pool.give_back(connection)
                raise
            else:
                self.status, self.headers = head
                self._connection = connection
                return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._pool.give_back(self._connection)
            self._connection = None

    @property
    def ended(self) -> bool:
        return self._connection is not None and self._connection.ended

    async def next_piece(self) -> bytes:
        connection = self._connection
        assert connection is not None
        try:
            while (piece := connection.take()) is None:
                await connection.more()
            return piece
        except Broken as exc:
            raise self._translated(exc) from exc

    async def follow(self, taker: Taker, channel: Channel | None = None) -> None:
        connection = self._connection
        assert connection is not None
        if not connection.has_news:
            await connection.follow(taker, channel)

    async def read(self, limit_bytes: int) -> bytes:
        connection = self._connection
        assert connection is not None
        body = connection.take_whole()
        if body and len(body) <= limit_bytes:
            return body
        if (connection.content_length or 0) > limit_bytes and self._method != "HEAD":
            raise self._too_large(limit_bytes)
        body = body or await self.next_piece()
        parts = []
        size = 0
        while body:
            parts.append(body)
            size += len(body)
            if size > limit_bytes:
                raise self._too_large(limit_bytes)
            body = await self.next_piece()
        return b"".join(parts)

    def _too_large(self, limit_bytes: int) -> EngineUnavailable:
        return EngineUnavailable(f"engine {self._name}: the answer is over {limit_bytes} bytes")

    def _translated(self, exc: Broken) -> EngineUnavailable:
        return EngineUnavailable(f"engine {self._name} broke off: {exc}", phase=exc.phase)
