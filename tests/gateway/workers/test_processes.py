"""Real processes: two workers and the one that keeps their state, and each of them is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from prfaas.testing.gateway_setup import (
    ENGINE,
    INSTANCE,
    KEY,
    MODEL,
    PEER,
    d_engine,
    link,
    p_engine,
)
from prfaas.testing.scripted_agent import ScriptedAgent, scripted_agent
from prfaas.testing.tenant_files import TenantFixture
from prfaas.testing.waiting import eventually

LONG_S = 60.0
"""For what other processes do, on a machine that does much else."""
SHORT = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
STREAMS = 16
LOG_LINE = re.compile(r"INFO gateway\.request: (\{.*\})$", re.MULTILINE)


class Engine:
    """Answers at once, and streams that end when they are let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.streaming = 0
        self.served = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Engine]:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.served += 1
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "ok"}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        self.streaming += 1
        try:
            await self.let_go.wait()
        finally:
            self.streaming -= 1
        await response.write(b'data: {"choices": [{"text": "b"}]}\n\ndata: [DONE]\n\n')
        await response.write_eof()
        return response


@dataclass
class World:
    """A supervisor with its workers; each request has a connection of its own."""

    process: asyncio.subprocess.Process
    port: int
    engine: Engine
    d: ScriptedAgent
    tenants: TenantFixture
    directory: Path
    policy: Path
    log: Path

    async def asked(self, body: dict[str, Any], tenant: str = "acme") -> tuple[int, bytes]:
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as client,
            client.post(
                "/v1/completions", json=body, headers=self.tenants.bearer(tenant)
            ) as answer,
        ):
            return answer.status, await answer.read()

    async def models_as(self, tenant: str) -> int:
        """The status of a request that uses nothing of the tenant's budget."""
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as client,
            client.get("/v1/models", headers=self.tenants.bearer(tenant)) as answer,
        ):
            return answer.status

    async def got(self, path: str) -> Any:
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as client,
            client.get(path, headers=self.tenants.bearer("boss")) as answer,
        ):
            assert answer.status == 200, await answer.text()
            return await (answer.json() if "json" in answer.content_type else answer.text())

    async def metrics(self) -> dict[str, float]:
        """Values by name and labels."""
        text = await self.got("/metrics")
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    async def dashboard(self) -> dict[str, Any]:
        """The second state that a page is sent: the first is the worker's own."""
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as client,
            client.get("/prfaas/dashboard/events", headers=self.tenants.bearer("boss")) as answer,
        ):
            states = []
            async for line in answer.content:
                if line.startswith(b'data: {"at"'):
                    states.append(json.loads(line[6:]))
                if len(states) == 3:
                    break
        return states[-1]

    async def workers(self) -> dict[str, Any]:
        return {each["name"]: each for each in (await self.got("/prfaas/cluster"))["workers"]}

    async def served(self) -> float:
        found = await self.metrics()
        return sum(
            value
            for name, value in found.items()
            if name.startswith("prfaas_gateway_requests_total") and 'status="200"' in name
        )

    async def state_pid(self) -> int:
        """Of the child that is no worker."""
        workers = {each["pid"] for each in (await self.workers()).values()}
        (pid,) = set(self.children()) - workers
        return pid

    def children(self) -> list[int]:
        found = []
        for each in Path("/proc").iterdir():
            if each.name.isdigit():
                try:
                    fields = (each / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[1]) == self.process.pid and fields[0] != "Z":
                    found.append(int(each.name))
        return found

    def logged(self) -> list[str]:
        """Ids in the request log, every line of which is whole."""
        lines = LOG_LINE.findall(self.log.read_text())
        return [json.loads(line)["request_id"] for line in lines]

    async def all_there(self, **restarts: int) -> bool:
        """Everybody answers, was started again so often, and workers are fed."""
        found = await self.metrics()
        return found["prfaas_gateway_workers"] == 2 and all(
            found.get(f'prfaas_gateway_process_restarts{{process="{name}"}}')
            == restarts.get(name.replace("-", "_"), 0)
            and (
                name == "state" or found[f'prfaas_gateway_worker_state_up{{worker="{name}"}}'] == 1
            )
            for name in ("state", "worker-0", "worker-1")
        )


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pw")))
        engine = await stack.enter_async_context(Engine().running())
        d = await stack.enter_async_context(scripted_agent(d_engine(), (link(),)))
        p = await stack.enter_async_context(scripted_agent(p_engine()))
        tenants = TenantFixture(tmp_path / "tenants.yaml")
        tenants.put("acme")
        tenants.put("boss", admin=True)
        policy, log = tmp_path / "policy.yaml", tmp_path / "log"
        policy.write_text("policy_version: 1\npolicy: always_local\n")
        config = tmp_path / "gateway.yaml"
        fields = {
            "port": 0,
            "workers": 2,
            "worker_dir": str(short),
            "model": MODEL,
            "engines": [{"name": ENGINE, "url": engine.url, "agent": d.address}],
            "peers": [{"peer": PEER, "instance": INSTANCE, "watch": p.address}],
            "transfer_key": KEY,
            "cache_secret": "secret",
            "policy": {"file": str(policy)},
            "tenants": {"file": str(tenants.path)},
        }
        config.write_text(yaml.safe_dump({"config_version": 1, "gateway": fields}))
        reader, writer = os.pipe()
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "prfaas", "gateway", "--config", str(config)),
                *("--ready-fd", str(writer)),
                pass_fds=(writer,),
                stderr=output,
            )
        os.close(writer)
        try:
            async with asyncio.timeout(LONG_S):
                port = int(await asyncio.to_thread(os.read, reader, 20) or b"0")
            assert port, log.read_text()
            yield World(process, port, engine, d, tenants, short, policy, log)
        finally:
            os.close(reader)
            engine.let_go.set()
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.mark.timeout(240)
async def test_workers_serve_together_and_whoever_dies_is_missed_by_nobody(world: World) -> None:
    engine = world.engine
    await eventually(lambda: world.all_there(), within_s=LONG_S)

    # Both serve, and either one answers for both.
    streams = [asyncio.create_task(world.asked({**SHORT, "stream": True})) for _ in range(STREAMS)]
    await eventually(lambda: engine.streaming == STREAMS, within_s=LONG_S)
    workers = await world.workers()
    in_flight = [worker["in_flight"] for worker in workers.values()]
    assert sum(in_flight) == STREAMS
    assert min(in_flight) > 0
    assert (await world.metrics())["prfaas_gateway_in_flight_requests"] == STREAMS
    shown = await world.dashboard()
    assert (shown["in_flight"], shown["decided"]) == (STREAMS, STREAMS)
    assert shown["engines"][0]["in_flight"] == STREAMS

    # The state dies: nothing fails, it is said, and it comes back.
    os.kill(await world.state_pid(), signal.SIGKILL)
    asked = 0

    async def serving_all_along(**restarts: int) -> bool:
        nonlocal asked
        status, _ = await world.asked(SHORT)
        assert status == 200
        asked += 1
        return await world.all_there(**restarts)

    await eventually(lambda: serving_all_along(state=1), within_s=LONG_S)
    found = await world.metrics()
    for name in workers:
        assert found[f'prfaas_gateway_worker_state_losses_total{{worker="{name}"}}'] == 1
    age = 'prfaas_gateway_telemetry_age_seconds{agent="d-0"}'

    async def fed_again() -> bool:
        return (await world.metrics())[age] < 5

    await eventually(fed_again, within_s=LONG_S)
    engine.let_go.set()
    answers = await asyncio.gather(*streams)
    assert [status for status, _ in answers] == [200] * STREAMS
    assert all(body.endswith(b"data: [DONE]\n\n") for _, body in answers)
    total = STREAMS + asked

    async def all_counted() -> bool:
        return await world.served() == total

    await eventually(all_counted, within_s=LONG_S)
    listed = (await world.got("/prfaas/requests?limit=1000"))["requests"]
    assert len(listed) == total
    await eventually(lambda: len(world.logged()) == total, within_s=LONG_S)
    assert set(world.logged()) == {each["request_id"] for each in listed}
    one = await world.got(f"/prfaas/requests/{listed[-1]['request_id']}")
    assert one["decision"]["reason"]

    # A worker dies: the other one serves, another takes its place, and sums do not fall.
    (counts,) = world.directory.glob("*/worker-0.counts")
    written = counts.stat().st_ino

    def written_again() -> bool:
        return counts.stat().st_ino != written

    await eventually(written_again, within_s=LONG_S)
    killed = workers["worker-0"]["pid"]
    os.kill(killed, signal.SIGKILL)
    # What it was reading is lost with it; once its last thread is gone, nobody is led there.
    await eventually(lambda: not Path(f"/proc/{killed}").exists(), within_s=LONG_S)
    await eventually(lambda: serving_all_along(state=1, worker_0=1), within_s=LONG_S)
    total = STREAMS + asked
    await eventually(all_counted, within_s=LONG_S)
    assert (await world.workers())["worker-0"]["pid"] != killed

    # A policy and a file of tenants that change reach both.
    world.policy.write_text("policy_version: 1\npolicy: always_remote\n")
    world.tenants.put("few", requests_per_minute=6)

    async def loaded() -> bool:
        found = await world.metrics()
        name = 'prfaas_gateway_policy_changes_total{result="loaded",role="active"}'
        return found.get(name) == 2 and found["prfaas_gateway_tenants"] == 3

    await eventually(loaded, within_s=LONG_S)

    # One budget for both.
    async def known() -> bool:
        """By both: each connection goes to one of them by chance."""
        return {await world.models_as("few") for _ in range(20)} == {200}

    await eventually(known, within_s=LONG_S)
    began = asyncio.get_running_loop().time()
    statuses = [(await world.asked(SHORT, "few"))[0] for _ in range(40)]
    minutes = (asyncio.get_running_loop().time() - began) / 60
    assert statuses.count(429) + statuses.count(200) == 40
    assert 1 <= statuses.count(200) <= 6 + 6 * minutes + 2

    # All stop in order: what was begun is finished.
    engine.let_go.clear()
    last = asyncio.create_task(world.asked({**SHORT, "stream": True}))
    await eventually(lambda: engine.streaming == 1, within_s=LONG_S)
    world.process.terminate()
    await eventually(lambda: "draining" in world.log.read_text(), within_s=LONG_S)
    engine.let_go.set()
    status, body = await last
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    async with asyncio.timeout(LONG_S):
        assert await world.process.wait() == 0
    assert list(world.directory.iterdir()) == []
    assert "Traceback" not in world.log.read_text()
