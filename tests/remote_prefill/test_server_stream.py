"""Whatever gRPC raises when a caller has left is Cancelled; writes never overlap."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from prfaas.errors import Cancelled
from remote_prefill.server_stream import ServerStream


class Context:
    """A servicer context whose writes wait for `go`."""

    def __init__(self, error: Exception | None = None, data: object = b"x") -> None:
        self.go = asyncio.Event()
        self.error = error
        self.data = data
        self.written: list[bytes] = []
        self.writing = 0

    async def read(self) -> object:
        if self.error is not None:
            raise self.error
        return self.data

    async def write(self, message: bytes) -> None:
        assert self.writing == 0
        self.writing += 1
        try:
            await self.go.wait()
            if self.error is not None:
                raise self.error
            self.written.append(message)
        finally:
            self.writing -= 1


@pytest.mark.parametrize(
    "error", [grpc.aio.InternalError("x"), grpc.RpcError(), asyncio.InvalidStateError()]
)
async def test_a_caller_that_has_left_is_cancelled(error: Exception) -> None:
    context = Context(error)
    context.go.set()
    stream = ServerStream(context)
    with pytest.raises(Cancelled):
        await stream.read()
    with pytest.raises(Cancelled):
        await stream.write(b"x")
    await stream.close()


async def test_the_end_of_the_stream_is_cancelled_and_an_empty_message_is_not() -> None:
    with pytest.raises(Cancelled, match="closed the stream"):
        await ServerStream(Context(data=grpc.aio.EOF)).read()
    assert await ServerStream(Context(data=b"")).read() == b""


async def test_a_write_after_a_cancelled_one_waits_for_it() -> None:
    context = Context()
    stream = ServerStream(context)
    first = asyncio.ensure_future(stream.write(b"first"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert context.writing == 1
    second = asyncio.ensure_future(stream.write(b"second"))
    await asyncio.sleep(0)
    context.go.set()
    await asyncio.wait_for(second, 1)
    assert context.written == [b"first", b"second"]
    await stream.close()


async def test_close_gives_up_a_write_that_nobody_takes() -> None:
    context = Context()
    stream = ServerStream(context)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.write(b"x"), 0.01)
    await asyncio.wait_for(stream.close(), 1)
    assert context.writing == 0
