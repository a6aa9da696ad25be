"""A Telemetry server on loopback that says what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio

from prfaas.hashing import BlockHash
from prfaas.rpc.convert_watch import watch_to_pb
from prfaas.rpc.v1 import prefill_pb2, prefill_pb2_grpc
from prfaas.settings import TlsSettings
from prfaas.snapshot import Outcome
from prfaas.telemetry import EngineInfo, KvDelta, LinkInfo, WatchUpdate
from prfaas.tls import server_credentials
from prfaas.tls_files import TlsFiles

HEARTBEAT_S = 0.05


class ScriptedAgent(prefill_pb2_grpc.TelemetryServicer):  # type: ignore[misc]
    """Owns one gRPC server; use as `async with scripted_agent(...) as agent`.

    `change` and `push` reach every watcher at once; a new one gets the full state first.
    """

    def __init__(self, engine: EngineInfo, links: tuple[LinkInfo, ...]) -> None:
        self.engine = engine
        self.links = links
        self.blocks: tuple[BlockHash, ...] = ()
        self.publishes_cache_events = True
        self.silent = False
        """Say nothing, not even that nothing changed."""
        self.address = ""
        self.streams = 0
        """Watch streams opened so far."""
        self._queues: set[asyncio.Queue[WatchUpdate | None]] = set()

    def __repr__(self) -> str:
        return f"<ScriptedAgent {self.engine.name} watchers={len(self._queues)}>"

    async def Watch(
        self, request: prefill_pb2.WatchRequest, context: object
    ) -> AsyncIterator[prefill_pb2.WatchEvent]:
        self.streams += 1
        queue: asyncio.Queue[WatchUpdate | None] = asyncio.Queue()
        self._queues.add(queue)
        seq = 0
        try:
            yield watch_to_pb(self._full())
            while True:
                update = await self._next(queue)
                if update is None:
                    return
                seq = update.seq or seq + 1
                yield watch_to_pb(replace(update, seq=seq))
        finally:
            self._queues.discard(queue)

    def change(self, **fields: object) -> None:
        """Change fields of the engine and tell."""
        self.engine = replace(self.engine, **fields)  # type: ignore[arg-type]
        self.push(WatchUpdate(0, False, engines=(self.engine,)))

    def change_link(self, **fields: object) -> None:
        """Change fields of the only link and tell."""
        self.links = (replace(self.links[0], **fields),)  # type: ignore[arg-type]
        self.push(WatchUpdate(0, False, links=self.links))

    def started(self, *transfer_ids: str) -> None:
        self.push(WatchUpdate(0, False, started=transfer_ids))

    def outcome(self, outcome: Outcome) -> None:
        self.push(WatchUpdate(0, False, outcomes=(outcome,)))

    def stored(self, *blocks: BlockHash) -> None:
        """The engine caches these blocks too."""
        self.blocks = (*self.blocks, *blocks)
        delta = KvDelta(self.engine.name, self.engine.epoch, stored=blocks)
        self.push(WatchUpdate(0, False, kv=(delta,)))

    def push(self, update: WatchUpdate) -> None:
        """Send any event; sequence 0 stands for the next one."""
        for queue in self._queues:
            queue.put_nowait(update)

    def end_streams(self) -> None:
        """End every open stream."""
        for queue in self._queues:
            queue.put_nowait(None)

    def _full(self) -> WatchUpdate:
        kv: tuple[KvDelta, ...] = ()
        if self.publishes_cache_events:
            kv = (KvDelta(self.engine.name, self.engine.epoch, cleared=True, stored=self.blocks),)
        return WatchUpdate(0, True, "scripted", (self.engine,), kv, self.links)

    async def _next(self, queue: asyncio.Queue[WatchUpdate | None]) -> WatchUpdate | None:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    return await queue.get()
            except TimeoutError:
                if not self.silent:
                    return WatchUpdate(0, False)


@asynccontextmanager
async def scripted_agent(
    engine: EngineInfo,
    links: tuple[LinkInfo, ...] = (),
    port: int = 0,
    tls: TlsSettings | None = None,
) -> AsyncIterator[ScriptedAgent]:
    """A running ScriptedAgent on a loopback port, by default a free one."""
    agent = ScriptedAgent(engine, links)
    server = grpc.aio.server()
    prefill_pb2_grpc.add_TelemetryServicer_to_server(agent, server)
    where = f"127.0.0.1:{port}"
    if tls is None:
        bound = server.add_insecure_port(where)
    else:
        bound = server.add_secure_port(where, server_credentials(TlsFiles(tls, "server")))
    agent.address = f"127.0.0.1:{bound}"
    await server.start()
    try:
        yield agent
    finally:
        agent.end_streams()
        await server.stop(0.1)
