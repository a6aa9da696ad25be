"""Clients that leave at any moment, or do not read: the engine stops, nothing is left."""

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway import front, handlers
from prfaas.testing.gateway_setup import (
    ByteTokenizer,
    completion,
    until,
)
from prfaas.testing.scripted_engine import Script
from prfaas.testing.tenant_files import TenantFixture


@pytest.mark.parametrize(
    "script",
    [
        Script(first_delay_s=60),
        Script(texts=("a",) * 500, token_delay_s=0.02),
        Script(stop_after=1, then="hang"),
    ],
    ids=["queued or prefilling", "decoding", "stuck"],
)
async def test_a_client_that_leaves_stops_the_engine(cluster: Any, script: Script) -> None:
    """Case 21; the fixture checks that nothing stays on the books."""
    cluster.engine.script = script
    body = completion(stream=True, max_tokens=500)
    task = asyncio.create_task(cluster.post(body, x_request_id="leaver"))
    await until(lambda: cluster.engine.seen, "the request at the engine")
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: cluster.engine.seen[0].cancelled, "the engine to be told", timeout_s=1)
    record = cluster.gateway.records.get("leaver")
    await until(lambda: record.status, "the record to end")
    assert (record.status, record.error) == ("499", "cancelled")


async def pieces(body: Any) -> AsyncIterator[bytes]:
    """A body without a length, which aiohttp's server reads."""
    yield json.dumps(body).encode()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_that_leaves_at_the_very_commit_is_no_error_of_ours(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, chunked: bool
) -> None:
    class Gone(web.StreamResponse):
        async def prepare(self, request: web.BaseRequest) -> None:
            raise ConnectionResetError("cannot write to a closing transport")

    make = handlers._ResponseSink.__init__

    def with_gone(sink: Any, *args: Any) -> None:
        make(sink, *args)
        sink.response = Gone()

    monkeypatch.setattr(handlers._ResponseSink, "__init__", with_gone)
    start = front.ClientStream.start

    async def start_gone(stream: Any, headers: Any) -> None:
        stream._connection.abort()
        await start(stream, headers)

    monkeypatch.setattr(front.ClientStream, "start", start_gone)
    body = completion(stream=True)
    headers = {"x-request-id": "leaver"}
    kind: dict[str, Any] = {"data": pieces(body)} if chunked else {"json": body}
    with contextlib.suppress(aiohttp.ClientError):
        async with cluster.client.post("/v1/completions", headers=headers, **kind):
            pass
    await until(lambda: cluster.gateway.records.get("leaver"), "the request")
    record = cluster.gateway.records.get("leaver")
    await until(lambda: record.status, "the record to end")
    assert (record.status, record.error) == ("499", "cancelled")
    assert "internal error" not in caplog.text


async def test_a_client_that_leaves_while_it_is_decided_sends_nothing(make_cluster: Any) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, text: str, add_special: bool = False) -> list[int]:
            if text.startswith("slow"):
                entered.set()
                go_on.wait(5)
            return super().encode(text)

    async with make_cluster(tokenizer=Slow()) as cluster:
        task = asyncio.create_task(cluster.post(completion("slow" * 2000)))
        await until(entered.is_set, "the tokeniser")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: cluster.gateway.admission.in_flight == 0, "the request to end")
        go_on.set()
        await asyncio.sleep(0.05)
        assert not cluster.engine.seen


async def test_leaving_a_hundred_times_leaves_nothing(cluster: Any) -> None:
    cluster.engine.script = Script(texts=("a",) * 500, token_delay_s=0.005)
    body = completion(stream=True, max_tokens=500)

    async def leave(at: int) -> None:
        task = asyncio.create_task(cluster.post(body))
        await asyncio.sleep(0.001 * (at % 20))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for _ in range(5):
        await asyncio.gather(*(leave(at) for at in range(20)))
    await until(lambda: cluster.engine.active == 0, "the engine to be idle")


async def test_a_slow_client_holds_up_only_itself_and_is_dropped(make_cluster: Any) -> None:
    """Case 25: back-pressure reaches the engine, so memory stays flat."""
    async with make_cluster(limits={"slow_client_timeout_s": 0.5}) as cluster:
        piece = "y" * 60_000
        cluster.engine.queue.append(Script(texts=(piece,) * 400))  # 24 MB
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", cluster.gateway.port, limit=1024
        )
        body = json.dumps(completion(stream=True, max_tokens=400)).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await until(lambda: cluster.engine.seen, "the request at the engine")
        await asyncio.sleep(0.2)
        slow = cluster.engine.seen[0]
        assert not slow.finished
        assert not slow.cancelled
        status, _, _ = await cluster.post(completion())  # others are not slowed
        assert status == 200
        await until(lambda: slow.cancelled, "the slow one to be dropped")
        writer.close()
        del reader


# --- the rest ------------------------------------------------------------------------------------


PHASES: dict[str, tuple[dict[str, Any], Script, bool]] = {
    # settings, what the engine does, whether an answer that runs keeps all others waiting
    "its body": ({}, Script(), False),
    "its turn": ({"tenants": {"active_requests": 1}}, Script(first_delay_s=600), True),
    "room": ({"limits": {"engine_active_requests": 1}}, Script(first_delay_s=600), True),
    "its prefill": ({}, Script(first_delay_s=600), False),
    "a first token behind comments": (
        {"limits": {"sse_keepalive_s": 0.02}}, Script(first_delay_s=600), False,
    ),
    "its tokens": ({}, Script(texts=("a",) * 500, token_delay_s=0.02), False),
}  # fmt: skip


def tasks_now() -> Counter[str]:
    """By what they run."""
    coroutines: Any = [task.get_coro() for task in asyncio.all_tasks()]
    return Counter(each.__qualname__ for each in coroutines)


LEAVERS = int(os.environ.get("PRFAAS_LEAVERS", "40"))


@pytest.mark.parametrize("phase", PHASES)
async def test_whoever_leaves_waiting_for_anything_leaves_nothing(
    make_cluster: Any, tmp_path: Path, phase: str
) -> None:
    settings, script, one_holds_all = PHASES[phase]
    tenants = TenantFixture(tmp_path / "tenants.yaml")
    tenants.put("acme", concurrent_requests=LEAVERS + 1)
    settings = {"tenants": {}, "limits": {}, **settings}
    settings["tenants"] = {"file": tenants.path, **settings["tenants"]}
    settings["limits"] = {
        "engine_active_requests": 0,
        "tenant_waiting": LEAVERS,
        "gateway_waiting": LEAVERS,
        **settings["limits"],
    }
    async with make_cluster(**settings) as cluster, contextlib.AsyncExitStack() as stack:
        gateway = cluster.gateway
        cluster.engine.script = script
        body = json.dumps(completion(stream=True, max_tokens=500)).encode()
        if phase == "its body":
            body = body[:-1] + b" " * 10  # and the rest does not come
        key = tenants.bearer("acme")["authorization"]
        whole = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\n"
            f"content-length: {len(body) + (phase == 'its body')}\r\n\r\n"
        ).encode() + body

        def ask() -> socket.socket:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            sock.sendall(whole)
            return sock

        def held() -> tuple[object, ...]:
            tenancy = gateway.tenancy
            turns = gateway.engines.turns
            return (
                gateway.admission.in_flight,
                tenancy.quotas.in_flight("acme"),
                tenancy.queue.active,
                tenancy.queue.waiting,
                0 if turns is None else turns.waiting,
                len(gateway.view.sent),
                gateway.budget.granted_tokens,
                gateway.front.open,
                cluster.engine.active,
            )

        start = held()
        assert start == (0,) * len(start)
        first = [ask()] if one_holds_all else []
        await until(lambda: cluster.engine.active == len(first), "the first at the engine")
        before, tasks = held(), tasks_now()
        for _ in range(2):
            leavers = [ask() for _ in range(LEAVERS)]
            entered = len(first) + LEAVERS
            await until(lambda n=entered: gateway.admission.in_flight == n, "all to be in", 60)
            if not one_holds_all and phase != "its body":
                await until(lambda: cluster.engine.active == LEAVERS, "all at the engine", 60)
            for sock in leavers:
                sock.close()
            await until(lambda: held() == before, "all to be forgotten", 60)

        def more() -> Counter[str]:  # a few begin and end all the time
            return Counter({k: v for k, v in (tasks_now() - tasks).items() if v > 5})

        await until(lambda: not more(), f"their tasks to end: {more()}", 60)
        for sock in first:
            sock.close()
        await until(lambda: held() == start, "nothing to be held", 60)
        cluster.engine.script = Script()
        status, _, _ = await cluster.post(completion(), **tenants.bearer("acme"))
        assert status == 200
