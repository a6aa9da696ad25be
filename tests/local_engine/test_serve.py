"""The engine process on real sockets: a tiny torch model, and a paced one where time counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from local_engine.serve import serve
from prfaas.errors import ConfigError
from prfaas.settings import load_settings
from prfaas.testing.tinymodel import make_tiny_model

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BYTE_TOKENIZER = Path(__file__).parents[2] / "deploy" / "profiles" / "byte-tokenizer"
GREEDY = {"temperature": 0, "max_tokens": 40}


@dataclass
class Process:
    """`serve` running in this process."""

    client: aiohttp.ClientSession
    task: asyncio.Task[None]

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.client.post(path, json=body) as response:
            return response.status, await response.json()

    async def text(self, body: dict[str, Any]) -> str:
        """The whole text of a completion, streamed."""
        async with self.client.post(TEXT, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            events = (await response.read()).split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        chunks = [json.loads(e.removeprefix(b"data: ")) for e in events[:-2]]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    async def books(self) -> dict[str, Any]:
        async with self.client.get("/debug/integrity") as response:
            books: dict[str, Any] = await response.json()
        assert response.status == 200, books
        return books

    async def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The books once the condition holds; within a second, as for a cancelled request."""
        end = time.monotonic() + 1.0
        while not condition(books := await self.books()):
            assert time.monotonic() < end, books
            await asyncio.sleep(0.01)
        return books

    async def wait_empty(self) -> None:
        await self.wait_until(
            lambda b: (
                b["running"] == b["waiting"] == b["queue_tokens"] == b["context_tokens"] == 0
                and b["free_blocks"] == b["total_blocks"]
            )
        )


Start = Callable[..., AbstractAsyncContextManager[Process]]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_context=4096)


@pytest.fixture
def paced_profile(tmp_path: Path) -> Path:
    """A prefill of a millisecond a token in chunks of 50, and 20 ms for each decode step."""
    path = tmp_path / "slow.yaml"
    profile = {
        "name": "slow",
        "source": "made up for a test",
        "tokenizer": str(BYTE_TOKENIZER),
        "model": {
            "layers": 2, "kv_heads": 1, "head_dim": 8, "dtype": "bfloat16", "max_context": 4096,
        },
        "prefill": {"base_s": 0.0, "token_s": 0.001, "chunk_tokens": 50},
        "decode": {"step_s": 0.02, "max_batch": 4},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(profile))
    return path


@pytest.fixture
def start() -> Start:
    @asynccontextmanager
    async def run(limits: dict[str, Any] | None = None, **engine: Any) -> AsyncIterator[Process]:
        engine = {"port": 0, "threads": 1, "kv_memory_bytes": 8 << 20, **engine}
        engine.setdefault("debug_endpoints", True)
        settings = load_settings(None, {"engine": engine, "limits": limits or {}})
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(settings, ready.set_result))
        try:
            await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            base = f"http://127.0.0.1:{ready.result()}"
            async with aiohttp.ClientSession(base) as client:
                yield Process(client, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return run


@pytest.fixture
async def tiny(start: Start, tiny_model: Path) -> AsyncIterator[Process]:
    async with start(model=str(tiny_model)) as process:
        yield process


@pytest.fixture
async def paced(start: Start, paced_profile: Path) -> AsyncIterator[Process]:
    async with start(paced=str(paced_profile)) as process:
        yield process


async def test_streamed_and_whole_answers_agree_and_the_prefix_cache_shows(tiny: Process) -> None:
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 8, **GREEDY}
    status, first = await tiny.post(TEXT, body)
    assert status == 200
    assert first["usage"]["completion_tokens"] == 40
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert await tiny.text(body) == first["choices"][0]["text"]
    _, again = await tiny.post(TEXT, body)
    assert again["choices"] == first["choices"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < again["usage"]["prompt_tokens"]
    assert cached % 16 == 0
    _, salted = await tiny.post(TEXT, {**body, "cache_salt": "another tenant"})
    assert salted["choices"] == first["choices"]
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await tiny.wait_empty()


async def test_concurrent_answers_are_each_ones_own(tiny: Process) -> None:
    bodies = [{"prompt": f"Question {i}: " + "why? " * i, **GREEDY} for i in range(6)]
    alone = [await tiny.text(body) for body in bodies]
    assert await asyncio.gather(*(tiny.text(body) for body in bodies)) == alone
    assert len(set(alone)) > 1


async def test_a_stop_string_across_real_tokens_cuts_the_text_there(tiny: Process) -> None:
    body = {"prompt": "Once upon a time", **GREEDY}
    whole = await tiny.text(body)
    for at in range(3, len(whole) - 6, 7):
        stop = whole[at : at + 5]
        expected = whole[: whole.index(stop)]
        assert await tiny.text({**body, "stop": stop}) == expected
        _, answer = await tiny.post(TEXT, {**body, "stop": stop})
        assert answer["choices"][0]["text"] == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
    await tiny.wait_empty()


async def test_stop_token_ids_end_an_answer_and_are_not_shown(paced: Process) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8}
    whole = await paced.text(body)
    _, answer = await paced.post(TEXT, {**body, "stop_token_ids": [ord(whole[5])]})
    (choice,) = answer["choices"]
    assert choice["text"] == whole[: whole.index(whole[5])]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(choice["text"]) + 1


async def test_a_seed_repeats_an_answer(tiny: Process) -> None:
    body = {"prompt": "Once upon a time", "temperature": 1, "max_tokens": 30}
    first = await tiny.text({**body, "seed": 7})
    assert await tiny.text({**body, "seed": 7}) == first
    assert await tiny.text({**body, "seed": 8}) != first


async def test_several_answers_follow_their_seeds_and_share_the_prompt(tiny: Process) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    body = {"prompt": prompt, "temperature": 1, "max_tokens": 12, "seed": 5}
    _, one = await tiny.post(TEXT, {**body, "cache_salt": "another tenant"})
    several = {**body, "n": 3, "logprobs": 1}
    _, three = await tiny.post(TEXT, several)
    texts = [choice["text"] for choice in three["choices"]]
    assert texts[0] == one["choices"][0]["text"]
    assert len(set(texts)) == 3
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 36
    assert three["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    async with tiny.client.get("/metrics") as response:
        (hits,) = re.findall(
            r"^vllm:prefix_cache_hits_total\S+ (\S+)$", await response.text(), re.M
        )
    assert float(hits) >= 2 * (one["usage"]["prompt_tokens"] // 16 - 1) * 16
    _, again = await tiny.post(TEXT, several)
    assert [choice["text"] for choice in again["choices"]] == texts
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for choice in three["choices"]:
        assert len(choice["logprobs"]["tokens"]) == 12
    await tiny.wait_empty()


async def test_a_bias_bans_and_forces_tokens(tiny: Process) -> None:
    body = {"prompt": "Once upon a time", **GREEDY, "max_tokens": 6, "logprobs": 0}
    _, plain = await tiny.post("/tokenize", {"prompt": "z"})
    (forced,) = plain["tokens"]
    _, answer = await tiny.post(TEXT, {**body, "logit_bias": {str(forced): 100}})
    assert answer["choices"][0]["text"] == "zzzzzz"
    _, free = await tiny.post(TEXT, body)
    assert free["choices"][0]["text"] != "zzzzzz"
    _, penalised = await tiny.post(
        TEXT, {**body, "logit_bias": {str(forced): 100}, "repetition_penalty": 100}
    )
    tokens = penalised["choices"][0]["logprobs"]["tokens"]
    assert (tokens[0], tokens.count("z")) == ("z", 1)


async def test_a_chat_is_the_completion_of_its_rendered_prompt(tiny: Process) -> None:
    messages = [{"role": "user", "content": "héllo 🙂"}]
    _, tokens = await tiny.post("/tokenize", {"messages": messages})
    _, chat = await tiny.post(CHAT, {"messages": messages, **GREEDY})
    _, text = await tiny.post(TEXT, {"prompt": tokens["tokens"], **GREEDY})
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"] == tokens["count"]


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(tiny: Process) -> None:
    moments = random.Random(3)

    async def leave() -> None:
        body = {"prompt": [1 + moments.randrange(700) for _ in range(300)], "max_tokens": 200}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(tiny.text(body), moments.uniform(0.0, 0.15))

    for _ in range(5):
        await asyncio.gather(*(leave() for _ in range(6)))
    await tiny.wait_empty()
    assert await tiny.text({"prompt": "still there", **GREEDY})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_a_client_that_leaves_frees_the_engine_within_a_second(
    paced: Process, phase: str, stream: bool
) -> None:
    async def ask(prompt: str) -> None:
        body = {"prompt": prompt, "stream": stream}
        async with paced.client.post(TEXT, json=body) as response:
            await response.read()

    clients = []
    if phase == "queued":
        clients.append(asyncio.create_task(ask("x" * 900)))
        await paced.wait_until(lambda b: b["waiting"] == 1)
    clients.append(asyncio.create_task(ask("y" * (10 if phase == "decode" else 800))))
    reached = {
        "queued": lambda b: b["waiting"] == 2,
        "prefill": lambda b: 0 < b["queue_tokens"] < 799,
        "decode": lambda b: b["running"] == 1,
    }
    await paced.wait_until(reached[phase])
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await paced.wait_empty()


async def test_a_full_queue_answers_503_with_retry_after(start: Start, paced_profile: Path) -> None:
    async with start(paced=str(paced_profile), limits={"engine_max_waiting": 1}) as process:
        first = asyncio.create_task(process.text({"prompt": "x" * 300, "max_tokens": 1}))
        await process.wait_until(lambda b: b["waiting"] == 1)
        async with process.client.post(TEXT, json={"prompt": "y"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "overloaded"
        await first


async def test_a_client_that_reads_nothing_is_dropped_while_others_are_served(
    start: Start, tiny_model: Path
) -> None:
    limits = {"engine_event_queue": 8, "slow_client_timeout_s": 0.5}
    # Every event repeats the name, so that the answer is larger than all the kernel's buffers.
    name = "tiny" * 1500
    async with start(limits, model=str(tiny_model), served_model_name=name) as process:
        url = str(process.client._base_url)
        port = int(url.rstrip("/").rsplit(":", 1)[1])
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", port))
            body = json.dumps({"prompt": "hello", "max_tokens": 3000, "stream": True}).encode()
            head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            await process.wait_until(lambda b: b["running"] == 1)
            assert await process.text({"prompt": "Once upon a time", **GREEDY})
            for _ in range(200):
                if (await process.books())["running"] == 0:
                    break
                await asyncio.sleep(0.05)
        async with process.client.get("/metrics") as response:
            page = await response.text()
        (made,) = re.findall(r"^vllm:generation_tokens_total\S+ (\S+)$", page, re.MULTILINE)
        assert float(made) < 3000, "the engine must not run ahead of a client that does not read"
        assert re.search(r"^vllm:request_success_total\S+abort\S+ 1\.0$", page, re.MULTILINE)
        await process.wait_empty()


async def test_a_paced_engine_says_so_and_keeps_its_pace(paced: Process) -> None:
    async with paced.client.get("/v1/models") as response:
        card = (await response.json())["data"][0]
    assert card["owned_by"] == "prfaas (paced: slow)"
    async with paced.client.get("/metrics") as response:
        assert 'paced="true",profile="slow"' in await response.text()
    began = time.monotonic()
    _, answer = await paced.post(TEXT, {"prompt": "x" * 201, "max_tokens": 11})
    took = time.monotonic() - began
    assert "paced-slow" in answer["system_fingerprint"]
    assert 0.2 + 11 * 0.02 <= took < 1.5
    assert len(answer["choices"][0]["text"]) == 11
    _, again = await paced.post(TEXT, {"prompt": "x" * 201, "max_tokens": 11})
    assert again["choices"] == answer["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


async def _streaming(process: Process, tokens: int, seen: asyncio.Event) -> bytes:
    body = {"prompt": "hi", "max_tokens": tokens, "stream": True}
    raw = b""
    async with process.client.post(TEXT, json=body) as response:
        async for part in response.content.iter_any():
            raw += part
            seen.set()
    return raw


async def _until_refused(process: Process) -> dict[str, Any]:
    while True:
        status, answer = await process.post(TEXT, {"prompt": "late", "max_tokens": 1})
        if status != 200:
            assert status == 503
            return answer["error"]  # type: ignore[no-any-return]


async def test_sigterm_finishes_what_runs_and_refuses_the_rest(paced: Process) -> None:
    seen = asyncio.Event()
    answer = asyncio.create_task(_streaming(paced, 40, seen))
    await seen.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await _until_refused(paced))["type"] == "engine_unavailable"
    async with paced.client.get("/ready") as response:
        assert response.status == 503
        assert (await response.json())["status"] == "draining"
    raw = await answer
    assert raw.endswith(b"data: [DONE]\n\n")
    assert raw.count(b"data: ") == 42
    await asyncio.wait_for(paced.task, 5)


async def test_a_second_signal_ends_running_answers_with_an_error_event(paced: Process) -> None:
    seen = asyncio.Event()
    answer = asyncio.create_task(_streaming(paced, 2000, seen))
    await seen.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await _until_refused(paced)
    os.kill(os.getpid(), signal.SIGINT)
    last = (await answer).split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "engine_unavailable"
    await asyncio.wait_for(paced.task, 5)


async def test_the_drain_limit_ends_running_answers_too(start: Start, paced_profile: Path) -> None:
    async with start(paced=str(paced_profile), limits={"drain_timeout_s": 0.2}) as process:
        seen = asyncio.Event()
        answer = asyncio.create_task(_streaming(process, 2000, seen))
        await seen.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert b"[DONE]" not in await answer
        await asyncio.wait_for(process.task, 5)


async def test_it_answers_503_while_the_model_loads(
    start: Start, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]

    import local_engine.serve as module

    real = module.assemble

    def slow(settings: Any) -> Any:
        time.sleep(0.5)
        return real(settings)

    monkeypatch.setattr(module, "assemble", slow)

    async def look() -> None:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            while not probe:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with client.get("/ready") as response:
                        probe.append(response.status)
                    async with client.post(CHAT, json={"messages": []}) as response:
                        probe.append(response.status)
                await asyncio.sleep(0.02)

    looking = asyncio.create_task(look())
    async with start(model=str(tiny_model), port=port) as process:
        await looking
        assert probe == [503, 503]
        async with process.client.get("/ready") as response:
            assert response.status == 200


async def test_a_signal_while_loading_ends_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import local_engine.serve as module

    loading = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = module.assemble
    made = []

    def slow(settings: Any) -> Any:
        loop.call_soon_threadsafe(loading.set)
        time.sleep(0.3)
        made.append(real(settings))
        return made[-1]

    monkeypatch.setattr(module, "assemble", slow)
    engine = {"model": str(tiny_model), "port": 0, "kv_memory_bytes": 8 << 20, "threads": 1}
    task = asyncio.create_task(serve(load_settings(None, {"engine": engine})))
    await loading.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 0.25)
    for _ in range(100):
        await asyncio.sleep(0.05)
        if made and made[0].engine._stopping and not made[0].engine.healthy:
            return
    raise AssertionError("the engine that came too late still runs")


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ({"model": "/nowhere"}, "/nowhere"),
        ({}, r"engine\.model"),
        ({"model": "TINY", "paced": "/p.yaml"}, r"engine\.model"),
        ({"model": "TINY", "device": "abacus"}, r"engine\.device"),
        ({"model": "TINY", "max_context": 5000}, r"engine\.max_context"),
        ({"model": "TINY", "max_context": 1024, "kv_blocks": 4}, r"engine\.max_context"),
        ({"paced": "PACED", "kv_dtype": "float32"}, r"engine\.kv_dtype"),
        ({"paced": "PACED", "max_batch": 5}, r"engine\.max_batch"),
        ({"paced": "/nowhere.yaml"}, r"/nowhere\.yaml"),
        ({"model": "TINY", "host": "192.0.2.1"}, r"engine\.port"),
    ],
)
async def test_a_setting_that_cannot_be_is_an_error_that_names_it(
    start: Start, tiny_model: Path, paced_profile: Path, engine: dict[str, Any], key: str
) -> None:
    places = {"TINY": str(tiny_model), "PACED": str(paced_profile)}
    engine = {name: places.get(str(value), value) for name, value in engine.items()}
    with pytest.raises(ConfigError, match=key):
        async with start(**engine):
            pass


async def test_contexts_end_where_the_pool_does(start: Start, tiny_model: Path) -> None:
    async with start(model=str(tiny_model), kv_blocks=8, block_tokens=16) as process:
        _, tokens = await process.post("/tokenize", {"prompt": "x"})
        assert tokens["max_model_len"] == 128
        _, answer = await process.post(TEXT, {"prompt": "x", "temperature": 0})
        assert answer["usage"]["total_tokens"] == 128


async def test_debug_endpoints_are_off_by_default(start: Start, tiny_model: Path) -> None:
    async with (
        start(model=str(tiny_model), debug_endpoints=False) as process,
        process.client.get("/debug/integrity") as response,
    ):
        assert response.status == 404


async def test_resetting_the_prefix_cache_forgets_prompts(tiny: Process) -> None:
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 8, **GREEDY}
    await tiny.post(TEXT, body)
    async with tiny.client.post("/debug/reset_prefix_cache") as response:
        assert response.status == 200
    _, answer = await tiny.post(TEXT, body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
