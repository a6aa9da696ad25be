"""KvPort over a real unix socket: both ends, shared memory, reconnect, rubbish."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prfaas.errors import ConfigError
from prfaas.kvport import EngineConn, PortClosed, PortServer
from prfaas.testing.waiting import eventually
from prfaas_connect.port.engine import EnginePort
from prfaas_connect.port.layout import GroupKind, KvLayout, LayerGroup
from prfaas_connect.port.messages import (
    PORT_VERSION,
    Abort,
    FetchDone,
    Hello,
    Join,
    PortMessage,
    RingFree,
    Welcome,
    encode,
)

LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, (0, 1), 2, 4, "float32"),))


def hello(**changes: object) -> Hello:
    fields: dict[str, object] = {
        "version": PORT_VERSION,
        "engine": "test",
        "roles": ["prefill", "decode"],
        "model": "m",
        "layout": LAYOUT.to_dict(),
        "chunk_tokens": 8,
        "block_tokens": 4,
        "max_tokens": 64,
        "vocab_size": 100,
        "model_identity": "i",
        "config_digest": "c",
        "tokenizer_digest": "t",
        "ranks": [[0, 2]],
        "epoch": "e",
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


class Recorder:
    """Engine handler that lets the test wait for events."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self._changed = threading.Condition()

    def on_connected(self, welcome: Welcome) -> None:
        self._add(welcome)

    def on_disconnected(self, reason: str) -> None:
        self._add(reason)

    def on_message(self, message: PortMessage, blob: bytes) -> None:
        self._add((message, blob))

    def _add(self, event: object) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    async def wait_for(self, count: int) -> None:
        def block() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: len(self.events) >= count, timeout=5)

        assert await asyncio.to_thread(block), self.events


class Agent:
    """A PortServer that keeps what its engine said."""

    def __init__(self, path: Path, **options: object) -> None:
        self.conns: asyncio.Queue[EngineConn] = asyncio.Queue()
        self.messages: asyncio.Queue[tuple[PortMessage, bytes]] = asyncio.Queue()
        defaults: dict[str, object] = {"ring_bytes": 4096, "staging_bytes": 8192}
        self.server = PortServer(
            path,
            agent_name="a",
            on_engine=self._run,
            **(defaults | options),  # type: ignore[arg-type]
        )

    async def _run(self, conn: EngineConn) -> None:
        await self.conns.put(conn)
        async for item in conn:
            await self.messages.put(item)


async def test_messages_and_shared_memory_cross_both_ways(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "s")
    await agent.server.start()
    seen = Recorder()
    port = EnginePort(str(tmp_path / "s"), hello(), seen)
    port.start()
    try:
        conn = await asyncio.wait_for(agent.conns.get(), 5)
        await seen.wait_for(1)
        assert port.connected
        assert port.ring_bytes == 4096
        assert conn.layout == LAYOUT

        offset = port.ring_reserve(100)
        assert offset == 0
        port.ring(offset, 100)[:] = np.arange(100, dtype=np.uint8)
        assert port.send(Abort("x"), b"blob")
        message, blob = await asyncio.wait_for(agent.messages.get(), 5)
        assert message == Abort("x")
        assert blob == b"blob"
        assert bytes(conn.ring[:100]) == bytes(range(100))

        conn.staging[8000:8004] = b"abcd"
        conn.send(FetchDone("s", "staged", "", token_end=3))
        conn.send(RingFree(1))
        await seen.wait_for(3)
        assert seen.events[1] == (FetchDone("s", "staged", "", token_end=3), b"")
        assert bytes(port.staging(8000, 4)) == b"abcd"
        assert port.ring_reserve(4096) == 0
    finally:
        await asyncio.to_thread(port.close)
        await agent.server.close()
    assert not (tmp_path / "s").exists()


async def test_engine_reconnects_with_fresh_memory_after_its_agent_restarts(tmp_path: Path) -> None:
    first = Agent(tmp_path / "s")
    await first.server.start()
    seen = Recorder()
    port = EnginePort(str(tmp_path / "s"), hello(), seen, reconnect_s=0.02)
    port.start()
    try:
        conn = await asyncio.wait_for(first.conns.get(), 5)
        await seen.wait_for(1)
        conn.staging[:4] = b"old!"
        old = port.staging(0, 4)
        await first.server.close()
        await seen.wait_for(2)
        assert isinstance(seen.events[1], str)
        assert not port.send(Abort("x"))
        second = Agent(tmp_path / "s")
        await second.server.start()
        await asyncio.wait_for(second.conns.get(), 5)
        await seen.wait_for(3)
        assert bytes(old) == b"old!"
        assert bytes(port.staging(0, 4)) == b"\0\0\0\0"
        await second.server.close()
    finally:
        await asyncio.to_thread(port.close)


async def test_engine_disconnect_ends_the_agents_iterator_and_later_sends_fail(
    tmp_path: Path,
) -> None:
    agent = Agent(tmp_path / "s")
    await agent.server.start()
    port = EnginePort(str(tmp_path / "s"), hello(), Recorder())
    port.start()
    conn = await asyncio.wait_for(agent.conns.get(), 5)
    await asyncio.to_thread(port.close)
    for _ in range(500):
        if conn.closed:
            break
        await asyncio.sleep(0.01)
    with pytest.raises(PortClosed):
        conn.send(RingFree(1))
    await agent.server.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 99},
        {"roles": ["cook"]},
        {"layout": {"groups": []}},
        {"layout": {"groups": [{"kind": "mystery"}]}},
        {"ranks": [[0, 1]]},
        {"ranks": [[]]},
        {"ranks": [[0, 1 << 62]]},
        {"chunk_tokens": 0},
    ],
)
async def test_unacceptable_hello_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    agent = Agent(tmp_path / "s")
    await agent.server.start()
    port = EnginePort(str(tmp_path / "s"), hello(**changes), Recorder(), reconnect_s=0.01)
    port.start()
    await asyncio.sleep(0.1)
    assert not port.connected
    assert agent.conns.empty()
    await asyncio.to_thread(port.close)
    await agent.server.close()


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"\x02\0\0\0\0\0\0\0{}",
        encode(Abort("x")),
        b"\x05\0\0\0\0\0\0\0[1,2]",
    ],
)
async def test_rubbish_on_the_socket_is_refused_and_the_next_engine_is_served(
    tmp_path: Path, rubbish: bytes
) -> None:
    agent = Agent(tmp_path / "s")
    await agent.server.start()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.setblocking(False)
        raw.connect(str(tmp_path / "s"))
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(raw, rubbish)
        answer = await asyncio.wait_for(loop.sock_recv(raw, 4096), 5)
        assert b"refused" in answer
    port = EnginePort(str(tmp_path / "s"), hello(), Recorder())
    port.start()
    await asyncio.wait_for(agent.conns.get(), 5)
    await asyncio.to_thread(port.close)
    await agent.server.close()


async def test_second_engine_is_refused_while_one_is_connected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(tmp_path / "s")
    await agent.server.start()
    one = EnginePort(str(tmp_path / "s"), hello(), Recorder())
    one.start()
    await asyncio.wait_for(agent.conns.get(), 5)
    two = EnginePort(str(tmp_path / "s"), hello(), Recorder(), reconnect_s=0.01)
    two.start()
    await asyncio.sleep(0.1)
    assert not two.connected
    assert one.connected
    assert [
        each.message for each in caplog.records if each.name == "prfaas_connect.port.engine"
    ] == [f"no agent at {tmp_path / 's'}: agent refused: another engine is connected"]
    await asyncio.to_thread(one.close)
    await asyncio.wait_for(agent.conns.get(), 5)
    await asyncio.to_thread(two.close)
    await agent.server.close()


async def test_agent_that_stops_reading_never_blocks_the_engine(tmp_path: Path) -> None:
    async def ignore(conn: EngineConn) -> None:
        await asyncio.sleep(30)

    server = PortServer(
        tmp_path / "s", agent_name="a", ring_bytes=4096, staging_bytes=4096, on_engine=ignore
    )
    await server.start()
    seen = Recorder()
    port = EnginePort(str(tmp_path / "s"), hello(), seen, max_queue=8, reconnect_s=5)
    port.start()
    await seen.wait_for(1)
    loop = asyncio.get_running_loop()
    started = loop.time()
    results = [port.send(Abort("x"), bytes(1 << 20)) for _ in range(40)]
    assert loop.time() - started < 2
    assert results[0]
    assert not results[-1], "a full queue cuts the connection instead of growing"
    await asyncio.to_thread(port.close)
    await server.close()


async def test_a_live_socket_is_not_stolen_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    agent = Agent(path)
    await agent.server.start()
    with pytest.raises(ConfigError, match="already listens"):
        await Agent(path).server.start()
    await agent.server.close()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    again = Agent(path)
    await again.server.start()
    await again.server.close()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        await Agent(tmp_path / "s").server.start()
    assert (tmp_path / "s").read_text() == "precious"


async def test_the_socket_is_its_owners_alone(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "s")
    await agent.server.start()
    try:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    finally:
        await agent.server.close()


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that everybody may enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try it as another user")
async def test_another_user_is_refused_even_where_the_socket_lets_him_in(
    open_directory: Path,
) -> None:
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.settimeout(5); s.connect(sys.argv[1]); sys.stdout.buffer.write(s.recv(4096))"
    )

    async def as_nobody(path: Path) -> tuple[bytes, bytes]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-ISc",
            script,
            str(path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return await asyncio.wait_for(process.communicate(), 10)

    path = open_directory / "s"
    agent = Agent(path)
    await agent.server.start()
    try:
        _, errors = await as_nobody(path)
        assert b"PermissionError" in errors
        os.chmod(path, 0o666)
        answer, _ = await as_nobody(path)
        assert b"user 65534 may not connect to this agent" in answer
    finally:
        await agent.server.close()
    assert agent.conns.empty()


async def test_other_processes_of_an_engine_join_it_and_leave_with_it(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "s")
    await agent.server.start()
    main_seen, rank_seen = Recorder(), Recorder()
    main = EnginePort(str(tmp_path / "s"), hello(ranks=[[0, 1], [1, 2]]), main_seen)
    main.start()
    rank: EnginePort | None = None
    try:
        conn = await asyncio.wait_for(agent.conns.get(), 5)
        await main_seen.wait_for(1)
        assert main.welcome is not None
        join = Join(PORT_VERSION, main.welcome.connection, 1)
        rank = EnginePort(str(tmp_path / "s"), join, rank_seen, reconnect_s=0.02)
        rank.start()
        await rank_seen.wait_for(1)
        await eventually(lambda: 1 in conn.ranks)
        conn.staging[:4] = b"both"
        assert bytes(main.staging(0, 4)) == bytes(rank.staging(0, 4)) == b"both"
        assert rank.ring_reserve(8) == 0
        rank.ring(0, 8)[:] = 7
        assert bytes(conn.ring[:8]) == bytes(8)
        assert bytes(conn.ranks[1].ring[:8]) == b"\x07" * 8
        conn.ranks[1].send(RingFree(1))
        await rank_seen.wait_for(2)

        conn.close()
        await rank_seen.wait_for(3)
        assert not rank.connected
    finally:
        for port in filter(None, (main, rank)):
            await asyncio.to_thread(port.close)
        await agent.server.close()


@pytest.mark.parametrize(
    "change", [{"connection": "of long ago"}, {"rank": 1}, {"rank": -1}, {"version": 2}]
)
async def test_a_process_of_no_connected_engine_is_refused_and_gives_up(
    tmp_path: Path, change: dict[str, object]
) -> None:
    agent = Agent(tmp_path / "s")
    await agent.server.start()
    main_seen, rank_seen = Recorder(), Recorder()
    main = EnginePort(str(tmp_path / "s"), hello(), main_seen)
    main.start()
    try:
        conn = await asyncio.wait_for(agent.conns.get(), 5)
        await main_seen.wait_for(1)
        assert main.welcome is not None
        right = {"version": PORT_VERSION, "connection": main.welcome.connection, "rank": 0}
        join = Join(**(right | change))  # type: ignore[arg-type]
        rank = EnginePort(str(tmp_path / "s"), join, rank_seen, reconnect_s=0.01, max_refusals=3)
        rank.start()
        try:
            await asyncio.to_thread(rank._reader.join, 5)
            assert not rank._reader.is_alive()
            assert not rank.connected
            assert not conn.ranks
            assert main.connected
        finally:
            await asyncio.to_thread(rank.close)
    finally:
        await asyncio.to_thread(main.close)
        await agent.server.close()


async def test_a_path_longer_than_an_address_is_said_to_be_too_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"xxx: AF_UNIX path too long, take one of at most 107"):
        await Agent(tmp_path / ("x" * 108)).server.start()
