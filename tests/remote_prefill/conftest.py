"""Agents and scripted engines in one process, over real sockets and shared memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from prfaas.settings import Settings
from prfaas.testing.scripted_port import ScriptedEngine
from prfaas.testing.waiting import eventually
from remote_prefill.prefill_main import PrefillServer
from remote_prefill.transport import open_channel


class PrefillSite:
    """A P agent with its scripted engine and a channel to it."""

    def __init__(self, server: PrefillServer, port: int, socket: Path) -> None:
        self.server = server
        self.agent = server.agent
        self.port = port
        self.socket = socket
        self.engine: ScriptedEngine | None = None
        self.channel: grpc.aio.Channel = open_channel(f"127.0.0.1:{port}")

    def assert_clean(self) -> None:
        """Every count is back where it began."""
        agent = self.agent
        assert not agent.sessions
        assert agent.retention.used_bytes == 0
        assert agent.retention.waiting == 0
        hub = agent._hub
        assert hub is None or (len(hub), hub.unfreed_records) == (0, 0)

    async def clean(self) -> None:
        """Wait for `assert_clean` to hold."""
        await eventually(self.assert_clean)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


Start = Callable[..., Awaitable[PrefillSite]]


@pytest.fixture
async def prefill_site(stack: AsyncExitStack, tmp_path: Path) -> Start:
    """Start a P agent; `engine=None` leaves it without one, else keywords of ScriptedEngine."""

    async def start(
        name: str = "p0",
        *,
        engine: dict[str, Any] | None = {},  # noqa: B006 - read only
        limits: dict[str, Any] | None = None,
        **prefill: Any,
    ) -> PrefillSite:
        socket = tmp_path / f"{name}.sock"
        settings = Settings.model_validate(
            {
                "prefill": {
                    "peer": "fra",
                    "instance": name,
                    "socket": socket,
                    "port": 0,
                    "ring_bytes": 1 << 16,
                    "retention_bytes": 1 << 20,
                    **prefill,
                },
                "limits": limits or {},
            }
        )
        server = PrefillServer(settings)
        stack.push_async_callback(server.stop)
        site = PrefillSite(server, await server.start(), socket)
        stack.push_async_callback(site.channel.close)
        if engine is not None:
            site.engine = ScriptedEngine(socket, **engine)
            stack.push_async_callback(site.engine.close)
            await site.engine.start()
            await eventually(lambda: site.agent.engine is not None)
        return site

    return start


@pytest.fixture
def tokens() -> Callable[..., np.ndarray]:
    """Random token ids within the scripted vocabulary."""

    def make(count: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)

    return make
