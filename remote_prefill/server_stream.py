"""A stream of frames as its handler at P sees it: the border where gRPC's exceptions end."""

from __future__ import annotations

import asyncio
from typing import Protocol

import grpc
import grpc.aio

from prfaas.errors import Cancelled

_GONE = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What gRPC raises, by turns, when the caller has left."""


class Context(Protocol):
    """What we use of gRPC's servicer context."""

    async def read(self) -> object: ...

    async def write(self, message: bytes) -> None: ...


class ServerStream:
    """Bytes from and to one caller. Both methods raise Cancelled once it has left.

    A write that is cancelled goes on in gRPC, which takes one at a time: the next one waits for
    it. `close` when the handler ends.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._writing: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """The next message."""
        try:
            data = await self._context.read()
        except _GONE as exc:
            raise Cancelled("the other side has left") from exc
        if not isinstance(data, bytes):
            raise Cancelled("the other side has closed the stream")
        return data

    async def write(self, message: bytes) -> None:
        """Waits while the transport is busy."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        self._writing = asyncio.ensure_future(self._context.write(message))
        try:
            await asyncio.shield(self._writing)
        except _GONE as exc:
            raise Cancelled("the other side has left") from exc

    async def close(self) -> None:
        """Give up a write that nobody takes."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
