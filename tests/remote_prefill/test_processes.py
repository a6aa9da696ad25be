"""Both agents as processes under uvloop: signals, drain, SIGKILL in the middle of a transfer."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import PeerUnavailable
from prfaas.testing.scripted_port import PrefillScript, ScriptedEngine
from prfaas.testing.waiting import eventually
from remote_prefill.lanes import LaneEvents
from remote_prefill.peer_channels import PeerChannels

PROGRAM = """
import json, sys, uvloop
from prfaas.settings import Settings
from remote_prefill.{module} import serve
settings = Settings.model_validate(json.loads(sys.argv[1]))
uvloop.run(serve(settings, lambda port: print(port, flush=True)))
"""


class Process:
    """One agent as a process; killed when the test ends."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, socket: Path) -> None:
        self.process = process
        self.port = port
        self.socket = socket

    @staticmethod
    async def start(module: str, settings: dict[str, Any], socket: Path) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PROGRAM.format(module=module),
            json.dumps(settings),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 20)
        return Process(process, int(line), socket)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()

    async def wait(self, within_s: float) -> int:
        return await asyncio.wait_for(self.process.wait(), within_s)


@pytest.fixture
async def prefill(stack: AsyncExitStack, tmp_path: Path) -> Process:
    socket = tmp_path / "p.sock"
    settings = {
        "prefill": {"peer": "fra", "instance": "p0", "socket": str(socket), "port": 0},
        "limits": {"drain_timeout_s": 20},
    }
    process = await Process.start("prefill_main", settings, socket)
    stack.push_async_callback(process.kill)
    return process


async def running_fetch(
    stack: AsyncExitStack, decode_site: Any, prefill: Process, tokens: Any
) -> tuple[Any, ScriptedEngine, Any, asyncio.Future[Any]]:
    """A fetch that stands before (chunk 1, layer 1) at a P that is a process of its own."""
    engine = ScriptedEngine(prefill.socket, script=PrefillScript())
    stack.push_async_callback(engine.close)
    await engine.start()
    d = await decode_site({"fra/p0": prefill.port})
    await d.ready("fra/p0")
    engine.script.stop_before = (1, 1)
    prompt = tokens(22)
    _, answer = d.engine.begin_fetch(d.params("fra/p0"), prompt)
    await eventually(lambda: d.link("fra/p0").sessions)
    (machine,) = d.link("fra/p0").sessions
    await eventually(lambda: machine.ledger.frames == 4)
    return d, engine, prompt, answer


async def test_a_killed_prefill_service_leaves_whole_chunks_and_an_exact_rest(
    stack: AsyncExitStack, decode_site: Any, prefill: Process, tokens: Any
) -> None:
    d, _, prompt, answer = await running_fetch(stack, decode_site, prefill, tokens)
    prefill.process.send_signal(signal.SIGKILL)
    done = await asyncio.wait_for(answer, 3)
    assert (done.status, done.reason, done.token_end) == ("partial", "peer_unavailable", 8)
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    await d.clean()
    await eventually(lambda: not d.link("fra/p0").ready)


async def test_sigterm_lets_the_prefill_service_finish_its_transfers(
    stack: AsyncExitStack, decode_site: Any, prefill: Process, tokens: Any
) -> None:
    d, engine, prompt, answer = await running_fetch(stack, decode_site, prefill, tokens)
    prefill.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    assert prefill.process.returncode is None
    refused = await d.engine.fetch(d.params("fra/p0"), prompt)
    assert (refused.status, refused.reason) == ("local", "peer_unavailable")
    engine.script.go.set()
    done = await asyncio.wait_for(answer, 3)
    assert done.status == "staged"
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    assert await prefill.wait(3) == 0
    assert not prefill.socket.exists()
    await d.clean()


async def test_a_second_signal_forces_and_d_is_told(
    stack: AsyncExitStack, decode_site: Any, prefill: Process, tokens: Any
) -> None:
    d, _, _, answer = await running_fetch(stack, decode_site, prefill, tokens)
    for _ in range(2):
        prefill.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
    done = await asyncio.wait_for(answer, 3)
    assert (done.status, done.reason, done.token_end) == ("partial", "peer_unavailable", 8)
    d.engine.release(done)
    assert await prefill.wait(5) == 0
    await d.clean()


async def test_a_stopped_process_is_a_progress_timeout_and_lives_on(
    stack: AsyncExitStack, decode_site: Any, prefill: Process, tokens: Any
) -> None:
    engine = ScriptedEngine(prefill.socket, script=PrefillScript(layer_s=0.02))
    stack.push_async_callback(engine.close)
    await engine.start()
    d = await decode_site({"fra/p0": prefill.port}, limits={"progress_timeout_s": 0.5})
    await d.ready("fra/p0")
    _, answer = d.engine.begin_fetch(d.params("fra/p0"), tokens(22))
    await eventually(lambda: d.link("fra/p0").sessions)
    (machine,) = d.link("fra/p0").sessions
    await eventually(lambda: machine.ledger.frames >= 3)
    prefill.process.send_signal(signal.SIGSTOP)
    try:
        done = await asyncio.wait_for(answer, 3)
    finally:
        prefill.process.send_signal(signal.SIGCONT)
    assert (done.status, done.reason) == ("partial", "prefill_timeout_progress")
    d.engine.release(done)
    await eventually(lambda: engine.ended and engine.ended[-1].status != "", within_s=5)
    await d.ready("fra/p0")
    done = await d.engine.fetch(d.params("fra/p0"), tokens(22))
    assert done.status == "staged"
    d.engine.release(done)
    await d.clean()


async def test_the_decode_agent_drains_on_sigterm_and_its_engine_falls_back(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    socket = tmp_path / "agent.sock"
    settings = {"agent": {"socket": str(socket), "port": 0}}
    process = await Process.start("agent_main", settings, socket)
    stack.push_async_callback(process.kill)
    engine = ScriptedEngine(socket)
    stack.push_async_callback(engine.close)
    await engine.start()
    process.process.send_signal(signal.SIGTERM)
    assert await process.wait(5) == 0
    await eventually(lambda: not engine.connected)
    assert not socket.exists()


async def test_a_host_that_is_not_loopback_stops_the_start_with_a_reason(tmp_path: Path) -> None:
    for module, section in (("prefill_main", "prefill"), ("agent_main", "agent")):
        settings = {section: {"host": "0.0.0.0", "socket": str(tmp_path / "s"), "port": 0}}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PROGRAM.format(module=module),
            json.dumps(settings),
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 1
        assert f"{section}.host: '0.0.0.0' is not a loopback address" in stderr.decode()


async def test_nobody_there_is_peer_unavailable_at_once() -> None:
    from prfaas.clock import SYSTEM_CLOCK
    from prfaas.dialling import Endpoint
    from prfaas.limits import Limits

    channels = PeerChannels(
        "fra/p0",
        Endpoint("127.0.0.1:1"),
        2,
        Limits(),
        SYSTEM_CLOCK,
        LaneEvents(lambda frames, nbytes: None, lambda: None, lambda error: None, lambda: None),
    )
    try:
        with pytest.raises(PeerUnavailable, match="cannot connect"):
            await asyncio.wait_for(channels.connect(), 1)
    finally:
        await channels.close()
