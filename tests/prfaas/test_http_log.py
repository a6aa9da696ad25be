"""A client that speaks no HTTP costs a line in the log; our own errors keep their traceback."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from prfaas.http_log import server_logger


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    async def fail(request: web.Request) -> web.Response:
        raise ValueError("a bug")

    async def lose(request: web.Request) -> web.Response:
        raise ConnectionResetError("cannot write to a closing transport")

    app = web.Application()
    app.router.add_get("/", fail)
    app.router.add_get("/gone", lose)
    runner = web.AppRunner(app, access_log=None, logger=server_logger())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def send(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read(100)
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"x" * 5000,
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    ],
)
async def test_malformed_requests_are_a_line_at_info(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as port:
        with caplog.at_level(logging.DEBUG, "prfaas.http"):
            assert b" 400 " in await send(port, data)
    (record,) = [r for r in caplog.records if r.name == "prfaas.http"]
    assert (record.levelno, record.exc_info) == (logging.INFO, None)
    assert len(record.getMessage()) < 200


async def test_a_client_that_has_left_is_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as port:
        with caplog.at_level(logging.DEBUG, "prfaas.http"):
            await send(port, b"GET /gone HTTP/1.1\r\nhost: x\r\n\r\n")
    (record,) = [r for r in caplog.records if r.name == "prfaas.http"]
    assert (record.levelno, record.exc_info) == (logging.INFO, None)


async def test_an_error_of_a_handler_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as port:
        with caplog.at_level(logging.DEBUG, "prfaas.http"):
            assert b" 500 " in await send(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    (record,) = [r for r in caplog.records if r.name == "prfaas.http"]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
