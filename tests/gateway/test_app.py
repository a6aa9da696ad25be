"""Starting, stopping, and what a gateway refuses to start with."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from gateway.app import check_settings
from prfaas.errors import ConfigError
from prfaas.testing.gateway_setup import ENGINE, KEY, MODEL, gateway_settings, until
from prfaas.testing.scripted_engine import Script, ScriptedEngine, scripted_engine

ENGINES = ({"name": "a", "url": "http://x"}, {"name": "b", "url": "http://y"})
PEER = {"peer": "p", "instance": "i", "watch": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engines": ()}, "gateway.engines: there must be at least one"),
        ({"engines": (*ENGINES, *ENGINES)}, "gateway.engines: names must be unique"),
        ({"peers": (PEER, PEER)}, "gateway.peers: names must be unique"),
        (
            {"transfer_key": ""},
            "gateway.transfer_key: offloading to peers needs the key that signs transfers",
        ),
    ],
)
def test_settings_that_cannot_work_name_the_key(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(gateway_settings(**fields))
    assert caught.value.message.startswith(message)
    assert message.startswith(caught.value.field)


async def test_a_port_that_cannot_be_had_is_named(make_cluster: Any) -> None:
    async with make_cluster(agents=False) as cluster:
        for host, port in (("127.0.0.1", cluster.gateway.port), ("192.0.2.1", 1)):
            with pytest.raises(ConfigError, match=rf"gateway.port: cannot listen on {host}:{port}"):
                async with make_cluster(agents=False, host=host, port=port):
                    pass


def test_no_key_is_needed_where_nothing_is_offloaded() -> None:
    check_settings(gateway_settings(transfer_key="", offload=False))
    check_settings(gateway_settings(transfer_key="", peers=()))


def test_the_gateway_imports_without_torch() -> None:
    code = "import gateway.app, sys; assert 'torch' not in sys.modules; print('ok')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "ok", done.stderr


class GatewayProcess:
    """`prfaas gateway` as a process in front of a scripted engine."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 10)


@asynccontextmanager
async def gateway_process(
    directory: Path, engine: ScriptedEngine, **limits: float
) -> AsyncIterator[GatewayProcess]:
    config = {
        "config_version": 1,
        "limits": limits,
        "gateway": {
            "port": 0,
            "model": MODEL,
            "engines": [{"name": ENGINE, "url": engine.url}],
            "transfer_key": KEY,
        },
    }
    path = directory / "gateway.yaml"
    path.write_text(yaml.safe_dump(config))
    reader, writer = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prfaas", "gateway", "--config", str(path),
        "--ready-fd", str(writer),
        pass_fds=[writer],
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            port = await asyncio.wait_for(asyncio.to_thread(pipe.readline), 20)
        yield GatewayProcess(process, int(port))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ask(gateway: GatewayProcess, **fields: object) -> tuple[int, str]:
    body = {"model": MODEL, "prompt": "hi", **fields}
    async with (
        aiohttp.ClientSession(gateway.url) as client,
        client.post("/v1/completions", json=body) as response,
    ):
        return response.status, await response.text()


async def test_sigterm_finishes_what_is_under_way_and_refuses_the_rest(tmp_path: Path) -> None:
    """Case 20."""
    async with scripted_engine(MODEL) as engine, gateway_process(tmp_path, engine) as gateway:
        engine.script = Script(texts=("a",) * 10, token_delay_s=0.08)
        running = asyncio.create_task(ask(gateway, stream=True))
        await until(lambda: engine.seen, "the request at the engine")
        gateway.signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        status, text = await ask(gateway)
        assert status == 503
        assert json.loads(text)["error"]["message"] == "the gateway is shutting down"
        status, text = await running
        assert status == 200
        assert text.endswith("data: [DONE]\n\n")
        assert await gateway.ended() == 0


async def test_a_second_signal_forces(tmp_path: Path) -> None:
    async with scripted_engine(MODEL) as engine, gateway_process(tmp_path, engine) as gateway:
        engine.script = Script(first_delay_s=60)
        running = asyncio.create_task(ask(gateway, stream=True))
        await until(lambda: engine.seen, "the request at the engine")
        gateway.signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert gateway.process.returncode is None
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended() == 0
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: engine.seen[0].cancelled, "the engine to be told")


async def test_the_drain_has_a_limit(tmp_path: Path) -> None:
    async with (
        scripted_engine(MODEL) as engine,
        gateway_process(tmp_path, engine, drain_timeout_s=0.2) as gateway,
    ):
        engine.script = Script(first_delay_s=60)
        running = asyncio.create_task(ask(gateway))
        await until(lambda: engine.seen, "the request at the engine")
        gateway.signal(signal.SIGINT)
        assert await gateway.ended() == 0
        await asyncio.gather(running, return_exceptions=True)
