from __future__ import annotations

import asyncio
import threading

import pytest

from local_engine.http.state import INLINE_TEXT_CHARS, ServerState
from prfaas.errors import InvalidRequest, Overloaded
from prfaas.limits import Limits

CHAT = "/v1/chat/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def test_too_many_texts_at_once_get_503(serve) -> None:
    async with serve(engine_max_waiting=1) as server:
        server.state._texts_waiting = 1
        status, answer, _ = await server.post("/tokenize", {"prompt": "x" * 5000})
        assert (status, answer["error"]["type"]) == (503, "overloaded")
        status, _, _ = await server.post("/tokenize", {"prompt": "short"})
        assert status == 200
        server.state._texts_waiting = 0


async def test_loading_and_draining_servers_are_alive_not_ready_and_say_so(serve) -> None:
    async with serve(ready=False) as server:
        assert (await server.get("/health"))[0] == 200
        status, answer, _ = await server.get("/ready")
        assert (status, answer["status"]) == (503, "loading")
        status, answer, headers = await server.post(CHAT, HI)
        assert (status, answer["error"]["type"]) == (503, "engine_unavailable")
        assert headers["Retry-After"] == "1"
        assert (await server.get("/metrics"))[0] == 503

        server.state.become_ready(server.serving)
        assert (await server.get("/ready"))[0] == 200

        server.state.become_draining()
        status, answer, _ = await server.get("/ready")
        assert (status, answer["status"]) == (503, "draining")
        assert (await server.post(CHAT, HI))[0] == 503
        assert (await server.get("/v1/models"))[0] == 200


async def test_a_server_whose_engine_failed_is_neither_alive_nor_ready(server) -> None:
    assert (await server.get("/health"))[0] == 200
    server.core.healthy = False
    assert (await server.get("/health"))[0] == 503
    status, answer, _ = await server.get("/ready")
    assert (status, answer["status"]) == (503, "broken")


async def test_integrity_answers_with_counts_or_with_what_is_wrong(server) -> None:
    status, answer, _ = await server.get("/debug/integrity")
    assert status == 200
    assert answer["ok"] is True
    assert (answer["free_blocks"], answer["total_blocks"]) == (6, 8)
    server.core.broken_pool = "block 3 has two owners"
    status, answer, _ = await server.get("/debug/integrity")
    assert (status, answer["problem"]) == (500, "block 3 has two owners")


async def test_texts_are_counted_while_they_wait_and_never_after() -> None:
    state = ServerState(Limits(engine_max_waiting=2))
    release = threading.Event()
    long = INLINE_TEXT_CHARS + 1
    first = asyncio.ensure_future(state.on_text(long, release.wait))
    second = asyncio.ensure_future(state.on_text(long, lambda: "second"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await state.on_text(long, lambda: "third")
    assert await state.on_text(1, lambda: "short ones do not wait") == "short ones do not wait"
    second.cancel()
    release.set()
    assert await first
    await asyncio.gather(second, return_exceptions=True)
    assert await state.on_text(long, lambda: "again") == "again"
    state.close()


async def test_an_error_in_the_text_thread_is_the_callers() -> None:
    state = ServerState(Limits())

    def fail() -> None:
        raise InvalidRequest("bad text")

    with pytest.raises(InvalidRequest):
        await state.on_text(INLINE_TEXT_CHARS + 1, fail)
    assert "tokenizing=0" in repr(state)
    state.close()
