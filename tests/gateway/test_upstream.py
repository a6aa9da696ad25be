"""aiohttp's client behind the interface: errors are ours, connections are given back or cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.upstream import HttpUpstream
from prfaas.errors import EngineUnavailable
from prfaas.limits import Limits
from prfaas.testing.gateway_setup import ENGINE, MODEL, completion, until
from prfaas.testing.scripted_engine import Script, scripted_engine

PATH = "/v1/completions"
HEADERS = {"content-type": "application/json", "x-request-id": "r1"}


def body(**fields: object) -> bytes:
    return msgspec.json.encode(completion("hi", **fields))


@asynccontextmanager
async def upstream_to(url: str) -> AsyncIterator[HttpUpstream]:
    upstream = HttpUpstream(url, "d-0", Limits(connect_timeout_s=0.5))
    try:
        yield upstream
    finally:
        await upstream.close()


async def test_a_whole_answer_is_read_and_the_connection_used_again() -> None:
    async with scripted_engine(MODEL) as engine, upstream_to(engine.url) as upstream:
        for _ in range(3):
            async with upstream.post(PATH, HEADERS, body()) as response:
                assert response.status == 200
                assert response.headers["Content-Type"].startswith("application/json")
                assert b"Hello, world." in await response.read(10_000)
        assert len(engine.seen) == 3
        assert engine.seen[0].headers["x-request-id"] == "r1"
        assert engine.seen[0].raw_body == body()
        assert (upstream.pool.open, upstream.pool.idle, upstream.pool.peak) == (1, 1, 1)


async def test_an_answer_over_the_limit_is_refused() -> None:
    async with (
        scripted_engine(MODEL) as engine,
        upstream_to(engine.url) as upstream,
        upstream.post(PATH, HEADERS, body()) as response,
    ):
        with pytest.raises(EngineUnavailable, match="over 10 bytes"):
            await response.read(10)


async def test_leaving_early_closes_the_connection() -> None:
    async with scripted_engine(MODEL) as engine, upstream_to(engine.url) as upstream:
        engine.script = Script(texts=("a",) * 1000, token_delay_s=0.01)
        async with upstream.post(PATH, HEADERS, body(stream=True, max_tokens=1000)) as response:
            assert await response.next_piece()
        await until(lambda: engine.seen[0].cancelled, "the engine to see it")


async def test_cancelling_before_the_head_closes_the_connection() -> None:
    async with scripted_engine(MODEL) as engine, upstream_to(engine.url) as upstream:
        engine.script = Script(first_delay_s=60)

        async def ask() -> None:
            async with upstream.post(PATH, HEADERS, body()):
                raise AssertionError("it never answers")

        task = asyncio.create_task(ask())
        await until(lambda: engine.seen, "the engine to get it")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: engine.seen[0].cancelled, "the engine to see it")


async def test_nobody_listening_is_engine_unavailable() -> None:
    async with upstream_to("http://127.0.0.1:9") as upstream:
        with pytest.raises(EngineUnavailable, match="engine d-0 cannot be reached"):
            async with upstream.post(PATH, HEADERS, body()):
                raise AssertionError
        assert not await upstream.healthy(0.5)


async def test_a_cut_connection_is_engine_unavailable() -> None:
    async with scripted_engine(MODEL) as engine, upstream_to(engine.url) as upstream:
        engine.script = Script(stop_after=2, then="cut")
        async with upstream.post(PATH, HEADERS, body(stream=True)) as response:
            with pytest.raises(EngineUnavailable, match="engine d-0 broke off"):
                await response.read(1 << 20)


async def test_health_is_a_200_in_time() -> None:
    async with scripted_engine(MODEL) as engine, upstream_to(engine.url + "/") as upstream:
        assert await upstream.healthy(1.0)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with server, upstream_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as up:
        assert not await up.healthy(0.05)


async def test_no_engine_at_all_is_a_502(make_cluster: Any) -> None:
    async with make_cluster() as cluster:
        nowhere = HttpUpstream("http://127.0.0.1:9", "d-0", Limits())
        cluster.gateway.engines[ENGINE].upstream = nowhere
        status, answer, _ = await cluster.post(completion())
        assert status == 502
        assert answer["error"]["message"] == "engine d-0 cannot be reached"
