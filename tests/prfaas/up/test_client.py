"""The timing client: every token timed, every failure an error of ours."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from prfaas.errors import EngineUnavailable, Overloaded, PrfaasError
from prfaas.testing.scripted_engine import Script, scripted_engine
from prfaas.up.client import OpenAIClient, StreamedAnswer


async def test_times_every_token_and_keeps_usage() -> None:
    async with scripted_engine() as engine, OpenAIClient(engine.url, timeout_s=20) as client:
        engine.script = Script(first_delay_s=0.05, token_delay_s=0.02)
        answer = await client.chat("hello there", max_tokens=10)
        assert answer.text == "Hello, world."
        assert answer.finish_reason == "stop"
        assert answer.ttft_s >= 0.05
        assert len(answer.itl_s) == 3
        assert min(answer.itl_s) > 0.01
        assert answer.usage["completion_tokens"] == 4
        assert engine.seen[0].body["temperature"] == 0


async def test_completes_token_arrays_and_passes_fields() -> None:
    async with scripted_engine() as engine, OpenAIClient(engine.url, timeout_s=20) as client:
        answer = await client.complete([1, 2, 3], max_tokens=2, ignore_eos=True)
        assert answer.text == "Hello,"
        assert answer.finish_reason == "length"
        assert engine.seen[0].body["prompt"] == [1, 2, 3]
        assert engine.seen[0].body["ignore_eos"] is True


async def test_errors_before_and_after_the_first_token_keep_their_class() -> None:
    async with scripted_engine() as engine, OpenAIClient(engine.url, timeout_s=20) as client:
        engine.script = Script(error=Overloaded("full"))
        with pytest.raises(Overloaded, match="full"):
            await client.chat("x", max_tokens=1)
        engine.script = Script(stop_after=1)
        with pytest.raises(EngineUnavailable, match="scripted failure"):
            await client.chat("x", max_tokens=4)


async def test_a_stream_without_done_is_an_error() -> None:
    async with scripted_engine() as engine, OpenAIClient(engine.url, timeout_s=20) as client:
        engine.script = Script(stop_after=1, then="cut")
        with pytest.raises(PrfaasError, match=r"broke|without"):
            await client.chat("x", max_tokens=4)


async def test_reads_json_and_reachability() -> None:
    async with scripted_engine() as engine, OpenAIClient(engine.url, timeout_s=20) as client:
        assert (await client.get("/v1/models"))["object"] == "list"
        assert (await client.post("/tokenize", {"prompt": "a b"}))["count"] > 0
        assert await client.status("/ready") == 200
        engine.ready = False
        assert await client.status("/ready") == 503
    async with OpenAIClient("http://127.0.0.1:9", timeout_s=5) as nobody:
        assert await nobody.status("/ready") == 0


def test_itl_between_counts_gaps_that_touch_the_window() -> None:
    answer = StreamedAnswer("", 0.0, token_at=[1.0, 2.0, 4.0, 5.0])
    assert answer.itl_between(2.5, 3.0) == [2.0]
    assert answer.itl_between(1.5, 4.5) == [1.0, 2.0, 1.0]


async def test_sockets_may_be_made_elsewhere() -> None:
    made: list[socket.socket] = []

    def make(address: tuple[Any, ...]) -> socket.socket:
        made.append(socket.socket(*address[:3]))
        return made[-1]

    async with (
        scripted_engine() as engine,
        OpenAIClient(engine.url, timeout_s=20, socket_factory=make) as client,
    ):
        await client.complete([1, 2, 3], max_tokens=2)
        assert made[0].getpeername()[1] == int(engine.url.rpartition(":")[2])
