from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from prfaas.errors import Overloaded
from prfaas.testing.scripted_engine import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    Script,
    ScriptedEngine,
    scripted_engine,
)

HI = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


async def ask(engine: ScriptedEngine, path: str, body: dict) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as client, client.post(engine.url + path, json=body) as r:
        return r.status, await r.read()


async def test_it_answers_whole_and_streamed_as_scripted() -> None:
    async with scripted_engine() as engine:
        engine.script = Script(texts=("a", "b"), cached_tokens=1)
        _, raw = await ask(engine, CHAT_PATH, HI)
        answer = json.loads(raw)
        assert answer["choices"][0]["message"]["content"] == "ab"
        assert answer["usage"]["prompt_tokens"] == 2
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        body = {"prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True}}
        _, raw = await ask(engine, COMPLETIONS_PATH, body)
        events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n")[:-1]]
        assert events[-1] == b"[DONE]"
        assert [json.loads(e)["choices"][0]["text"] for e in events[:2]] == ["a", "b"]
        assert json.loads(events[-2])["usage"]["prompt_tokens"] == 3
        assert [seen.finished for seen in engine.seen] == [True, True]


async def test_max_tokens_cuts_the_script() -> None:
    async with scripted_engine() as engine:
        _, raw = await ask(engine, COMPLETIONS_PATH, {"prompt": "x", "max_tokens": 1})
        choice = json.loads(raw)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")


async def test_scripts_are_taken_from_the_queue_first() -> None:
    async with scripted_engine() as engine:
        engine.queue.append(Script(error=Overloaded("full", retry_after_s=3)))
        status, raw = await ask(engine, CHAT_PATH, HI)
        assert (status, json.loads(raw)["error"]["type"]) == (503, "overloaded")
        assert (await ask(engine, CHAT_PATH, HI))[0] == 200


async def test_a_scripted_failure_comes_after_so_many_tokens() -> None:
    async with scripted_engine() as engine:
        engine.queue.append(Script(stop_after=2))
        _, raw = await ask(engine, CHAT_PATH, {**HI, "stream": True})
        events = raw.split(b"\n\n")[:-1]
        assert len(events) == 3
        assert b"scripted failure" in events[-1]
        engine.queue.append(Script(stop_after=1, then="cut"))
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(engine, CHAT_PATH, {**HI, "stream": True})


async def test_a_client_that_leaves_is_noticed() -> None:
    async with scripted_engine() as engine:
        engine.script = Script(stop_after=1, then="hang")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(engine, CHAT_PATH, {**HI, "stream": True}), 0.2)
        for _ in range(100):
            if not engine.active:
                break
            await asyncio.sleep(0.01)
        assert engine.active == 0
        assert engine.seen[0].cancelled
