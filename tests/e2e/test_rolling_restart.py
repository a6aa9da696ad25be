"""Gateways are restarted one after another, as docs/operations.md says, and no client notices."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp
import pytest
import yaml

from prfaas.testing.redis_server import WHY_SKIPPED, found, redis_server
from prfaas.testing.scripted_engine import Script, scripted_engine
from prfaas.testing.waiting import eventually

MODEL = "tiny"
CLIENTS = 6
TEXTS = tuple(f"{number} " for number in range(30))


class Process:
    """One gateway, and where it listens; stop it with `stop`."""

    def __init__(self, config: Path, port: int) -> None:
        self.config = config
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Until it takes requests."""
        with self.config.with_suffix(".log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "prfaas", "gateway", "--config", str(self.config),
                "--port", str(self.port), stdout=log, stderr=log,
            )  # fmt: skip

        async def ready() -> bool:
            assert self._process is not None
            assert self._process.returncode is None, self.config.with_suffix(".log").read_text()
            try:
                async with session.get(f"{self.url}/ready") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await eventually(ready, within_s=60)

    async def drain(self) -> int:
        """Its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            return await self._process.wait()

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Clients:
    """Streams through the gateways that a load balancer would offer; `offered` is its list."""

    def __init__(self, offered: list[Process]) -> None:
        self.offered = offered
        self.served: list[int] = []
        """Ports, as answers end."""
        self.bad: list[str] = []

    async def run(self, stop: asyncio.Event) -> None:
        number = 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            while not stop.is_set():
                number += 1
                gateway = self.offered[number % len(self.offered)]
                await self._ask(session, gateway)

    async def _ask(self, session: aiohttp.ClientSession, gateway: Process) -> None:
        body = {"model": MODEL, "prompt": "x " * 700, "max_tokens": 64, "stream": True}
        try:
            async with session.post(f"{gateway.url}/v1/completions", json=body) as response:
                text = await response.text()
        except aiohttp.ClientError as exc:
            self.bad.append(f"{gateway.port}: {exc!r}")
            return
        if response.status != 200 or not text.endswith("data: [DONE]\n\n"):
            self.bad.append(f"{gateway.port}: {response.status} {text[-200:]}")
        self.served.append(gateway.port)


def config_of(file: Path, engine_url: str, redis_url: str) -> Path:
    gateway = {
        "model": MODEL,
        "engines": [{"name": "d-0", "url": engine_url}],
        "state": {"redis": redis_url, "member_ttl_s": 60.0},
    }
    file.write_text(yaml.safe_dump({"config_version": 1, "gateway": gateway}))
    return file


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def asking(clients: Clients) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(clients.run(stop))
        try:
            yield
        finally:
            stop.set()


@pytest.mark.skipif(not found(), reason=WHY_SKIPPED)
async def test_no_request_fails_while_two_gateways_are_restarted_one_by_one(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "redis"
    folder.mkdir()
    async with (
        scripted_engine(MODEL) as engine,
        redis_server(folder) as redis,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session,
    ):
        engine.script = Script(texts=TEXTS, token_delay_s=0.005)
        made = [
            Process(config_of(tmp_path / f"gateway-{at}.yaml", engine.url, redis.url()), port)
            for at, port in enumerate((free_port(), free_port()))
        ]

        async def gateways_together(gateway: Process) -> float:
            async with session.get(f"{gateway.url}/metrics") as response:
                lines = (await response.text()).splitlines()
            name = "prfaas_gateway_state_gateways "
            return next(float(line[len(name) :]) for line in lines if line.startswith(name))

        try:
            await asyncio.gather(*(gateway.start(session) for gateway in made))
            clients = Clients(list(made))
            async with asking(clients):
                for gateway in made:
                    before = clients.served.count(gateway.port)
                    await eventually(
                        lambda g=gateway, n=before: clients.served.count(g.port) > n + 3,
                        within_s=60,
                    )
                    clients.offered = [other for other in made if other is not gateway]
                    assert await gateway.drain() == 0
                    (other,) = clients.offered

                    async def left(other: Process = other) -> bool:
                        return await gateways_together(other) == 1

                    # It said so, long before its time was over.
                    await eventually(left, within_s=30)
                    await gateway.start(session)
                    clients.offered = list(made)
                    after = clients.served.count(gateway.port)
                    await eventually(
                        lambda g=gateway, n=after: clients.served.count(g.port) > n + 3,
                        within_s=60,
                    )
            assert clients.bad == []
            for gateway in made:
                assert await gateways_together(gateway) == 2
        finally:
            for gateway in made:
                await gateway.stop()
