"""Agents and scripted engines in one process, over real sockets and shared memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import numpy as np
import pytest

from prfaas.dialling import Endpoint
from prfaas.settings import Settings
from prfaas.snapshot import Outcome
from prfaas.testing.bare_client import BareClient
from prfaas.testing.scripted_port import ScriptedEngine
from prfaas.testing.waiting import eventually
from prfaas.transfer import PARAMS_VERSION, PlanStep, TransferParams, sign
from remote_prefill.agent_main import AgentServer
from remote_prefill.peer_link import PeerLink
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
        self.channel: grpc.aio.Channel = open_channel(Endpoint(f"127.0.0.1:{port}"))

    def client(
        self, tokens: np.ndarray, *, link: bytes | None = None, **changes: Any
    ) -> BareClient:
        """A client without an agent, on a link of its own if not on `link`."""
        link = self.agent.links.open("", "bare", b"").token if link is None else link
        return BareClient(self.channel, link, tokens, **changes)

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


@pytest.fixture(autouse=True)
def no_internal_error(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which an agent met an exception it did not expect."""
    yield
    for when in ("setup", "call", "teardown"):
        records = caplog.get_records(when)  # type: ignore[arg-type]
        unexpected = [r for r in records if r.exc_info]
        assert not unexpected, [r.getMessage() for r in unexpected]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def started(engine: ScriptedEngine, stack: AsyncExitStack) -> ScriptedEngine:
    """Connected to its agent; closed with the stack."""
    stack.push_async_callback(engine.close)
    await engine.start()
    return engine


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
            site.engine = await started(ScriptedEngine(socket, **engine), stack)
            await eventually(lambda: site.agent.engine is not None)
        return site

    return start


KEY = b"transfer-key"


class DecodeSite:
    """A D agent with its scripted engine."""

    def __init__(self, server: AgentServer, port: int, socket: Path) -> None:
        self.server = server
        self.agent = server.agent
        self.port = port
        self.socket = socket
        self.engine: ScriptedEngine | None = None
        self.channel: grpc.aio.Channel = open_channel(Endpoint(f"127.0.0.1:{port}"))
        self._ids = itertools.count(1)

    def params(self, *plan: str, key: bytes = KEY, **changes: Any) -> dict[str, Any]:
        """Signed transfer parameters for instances such as `fra/p0`."""
        params = TransferParams(
            version=PARAMS_VERSION,
            transfer_id=f"t{next(self._ids)}",
            plan=tuple(PlanStep(*name.split("/")) for name in plan),
            on_failure="local",
            quality="exact",
            deadline_s=20.0,
            salt="salt",
            expires=time.time() + 30,
        )
        return sign(msgspec.structs.replace(params, **changes), key).to_dict()

    def link(self, name: str) -> PeerLink:
        return next(link for link in self.agent.pool if link.name == name)

    async def ready(self, *names: str) -> None:
        """Wait until the links are paired."""
        await eventually(lambda: all(self.link(name).ready for name in names))

    async def half_sent(self, p: PrefillSite, params: Any, prompt: Any) -> tuple[Any, Any]:
        """A fetch from `fra/p0` that stands before (chunk 1, layer 2); its answer and its session
        here."""
        await self.ready("fra/p0")
        p.engine.script.stop_before = (1, 2)
        _, answer = self.engine.begin_fetch(params, prompt)
        await eventually(lambda: self.link("fra/p0").info().sessions)
        (machine,) = self.link("fra/p0").sessions
        await eventually(lambda: machine.ledger.frames == 5)
        return answer, machine

    def outcomes(self) -> dict[str, Outcome]:
        """By transfer id; fails where one was reported twice."""
        found = {o.transfer_id: o for o in self.agent.feed.outcomes}
        assert len(found) == len(self.agent.feed.outcomes)
        return found

    async def outcome(self, params: dict[str, Any]) -> Outcome:
        """The outcome of a transfer, once it is there."""
        await eventually(lambda: params["transfer_id"] in self.outcomes())
        return self.outcomes()[params["transfer_id"]]

    def assert_clean(self) -> None:
        """Every count is back where it began."""
        agent = self.agent
        assert agent.open_fetches == 0
        assert not agent.feed.active
        for link in agent.pool:
            assert link.info().sessions == 0
            assert link.info().in_flight_bytes == 0
            assert link.open_streams == 0
        if agent.side is not None:
            staging = agent.side.staging
            assert (staging.used_bytes, staging.extents, staging.waiting) == (0, 0, 0)
            assert (len(agent.side.hub), agent.side.hub.unfreed_records) == (0, 0)
            assert staging.free_bytes == staging.capacity

    async def clean(self, *sites: PrefillSite) -> None:
        """Wait until this side and the others are clean."""
        await eventually(self.assert_clean)
        for site in sites:
            await site.clean()


@pytest.fixture
async def decode_site(stack: AsyncExitStack, tmp_path: Path) -> Callable[..., Any]:
    """Start a D agent that may dial `peers` (name to port, or to a PrefillSite)."""

    async def start(
        peers: dict[str, Any],
        *,
        engine: dict[str, Any] | None = {},  # noqa: B006 - read only
        limits: dict[str, Any] | None = None,
        **agent: Any,
    ) -> DecodeSite:
        socket = tmp_path / "d.sock"
        entries: dict[str, list[dict[str, str]]] = {}
        for name, where in peers.items():
            peer, instance = name.split("/")
            port = where if isinstance(where, int) else where.port
            entries.setdefault(peer, []).append({"name": instance, "address": f"127.0.0.1:{port}"})
        settings = Settings.model_validate(
            {
                "agent": {
                    "name": "d0",
                    "socket": socket,
                    "port": 0,
                    "ring_bytes": 1 << 16,
                    "staging_bytes": 1 << 16,
                    "transfer_keys": [KEY.decode()],
                    "probe_bytes": 1 << 14,
                    "peers": [
                        {"name": name, "channels": 2, "instances": instances}
                        for name, instances in entries.items()
                    ],
                    **agent,
                },
                "limits": limits or {},
            }
        )
        server = AgentServer(settings)
        stack.push_async_callback(server.stop)
        site = DecodeSite(server, await server.start(), socket)
        stack.push_async_callback(site.channel.close)
        if engine is not None:
            site.engine = await started(ScriptedEngine(socket, **engine), stack)
            await eventually(lambda: site.agent.side is not None)
        return site

    return start


@pytest.fixture
def tokens() -> Callable[..., np.ndarray]:
    """Random token ids within the scripted vocabulary."""

    def make(count: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)

    return make
