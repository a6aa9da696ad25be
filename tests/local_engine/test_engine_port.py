"""Engine and agent over the real port: a unix socket and shared memory."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from local_engine.engine import Engine
from local_engine.kv.pool import KvPool
from local_engine.requests import EngineRequest, EngineStats, SamplingParams
from local_engine.testing import (
    CHAIN_LAYERS,
    CHAIN_LAYOUT,
    CHAIN_VOCAB,
    ChainRunner,
    chain_answer,
    chain_kv,
)
from prfaas.hashing import block_chain
from prfaas.kvport import EngineConn, PortServer
from prfaas.limits import Limits
from prfaas.settings import EngineSettings
from prfaas.testing.waiting import eventually
from prfaas_connect.port.engine import EnginePort
from prfaas_connect.port.messages import (
    PORT_VERSION,
    Fetch,
    FetchDone,
    Hello,
    KvEvents,
    PortMessage,
    PrefillEnd,
    PrefillStart,
    Record,
    Release,
    RingFree,
    Stats,
)

M = TypeVar("M", bound=PortMessage)
CHUNK = 8
LAYER_TOKEN = CHAIN_LAYOUT.groups[0].token_bytes


class Agent:
    """A scripted agent behind the real server side of the port."""

    def __init__(self, path: Path, *, ring_bytes: int = 1 << 16) -> None:
        self.path = path
        self.messages: list[tuple[float, PortMessage]] = []
        self.names: set[str] = set()
        self.conn: EngineConn | None = None
        self.records: list[tuple[Record, bytes]] = []
        self.on_fetch: Callable[[Fetch, list[int]], None] = lambda fetch, prompt: None
        self._ring_bytes = ring_bytes
        self.server = self._make_server()

    def _make_server(self) -> PortServer:
        return PortServer(
            self.path, agent_name="test", ring_bytes=self._ring_bytes, staging_bytes=1 << 18,
            verify_import=True, on_engine=self._serve,
        )  # fmt: skip

    async def restart(self) -> None:
        """Go away as a killed agent does, and come back with nothing remembered."""
        await self.server.close()
        self.messages.clear()
        self.names.clear()
        self.server = self._make_server()
        await self.server.start()

    async def _serve(self, conn: EngineConn) -> None:
        self.conn = conn
        async for message, blob in conn:
            self.messages.append((time.monotonic(), message))
            match message:
                case KvEvents():
                    if message.cleared:
                        self.names.clear()
                    self.names |= set(message.stored)
                    self.names -= set(message.removed)
                case Fetch():
                    self.on_fetch(message, np.frombuffer(blob, dtype="<i4").tolist())
                case Record():
                    data = bytes(conn.ring[message.offset : message.offset + message.nbytes])
                    self.records.append((message, data))
                    conn.send(RingFree(1))
                case _:
                    pass
        self.conn = None

    def of(self, kind: type[M]) -> list[M]:
        return [m for _, m in self.messages if isinstance(m, kind)]

    def stage(self, fetch: Fetch, prompt: list[int], end: int) -> None:
        """Put KV into staging and say so."""
        assert self.conn is not None
        for extent in CHAIN_LAYOUT.extents(fetch.have, end, CHUNK):
            rows = chain_kv(prompt, extent.layer)[:, extent.span.start : extent.span.end]
            self.conn.staging[extent.offset : extent.offset + extent.nbytes] = rows.tobytes()
        self.conn.send(FetchDone(fetch.session, "staged", "", end, 0, CHUNK))


@asynccontextmanager
async def pair(
    tmp_path: Path, *, ring_bytes: int = 1 << 16
) -> AsyncIterator[tuple[Engine, Agent, ChainRunner]]:
    """A started engine, connected to a scripted agent."""
    agent = Agent(tmp_path / "port.sock", ring_bytes=ring_bytes)
    await agent.server.start()
    pool = KvPool(CHAIN_LAYOUT, 64, 4)
    runner = ChainRunner(pool)
    settings = EngineSettings(block_tokens=4, chunk_tokens=CHUNK)
    engine = Engine(
        runner, pool, settings, Limits(),
        vocab_size=CHAIN_VOCAB, eos_ids=frozenset(), max_context=256,
    )  # fmt: skip
    hello = Hello(
        version=PORT_VERSION, engine="test", roles=["prefill", "decode"], model="chain",
        layout=CHAIN_LAYOUT.to_dict(), chunk_tokens=CHUNK, block_tokens=4, max_tokens=256,
        vocab_size=CHAIN_VOCAB, model_identity="m", config_digest="c", tokenizer_digest="t",
        ranks=[[0, 1]], epoch=engine.epoch,
    )  # fmt: skip
    engine.attach_port(EnginePort(str(agent.path), hello, engine, reconnect_s=0.02))
    runner.strict = False
    await asyncio.to_thread(engine.start)
    runner.strict = True
    try:
        await eventually(lambda: agent.of(Stats))
        yield engine, agent, runner
        await eventually(lambda: engine.stats().waiting == engine.stats().exporting == 0)
        await engine.check_integrity()
        assert engine.stats().free_blocks == 64
    finally:
        await asyncio.to_thread(engine.close)
        await agent.server.close()


async def ask(engine: Engine, prompt: list[int], **params: Any) -> list[int]:
    name = f"r{time.monotonic_ns()}"
    sampling = SamplingParams(6, temperature=0.0)
    stream = await engine.submit(
        EngineRequest(name, tuple(prompt), sampling, kv_transfer_params=params or None)
    )
    events = [event async for event in stream]
    assert events[-1].error is None
    return [token for event in events for token in event.token_ids]


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * 7 + i * i) % CHAIN_VOCAB for i in range(count)]


async def test_remote_kv_is_fetched_imported_and_released(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent, runner):
        agent.on_fetch = lambda fetch, prompt: agent.stage(fetch, prompt, fetch.want)
        chunks = len(runner.chunks)
        assert await ask(engine, tokens(30), plan="x") == chain_answer(tokens(30), 6)
        assert len(runner.chunks) == chunks
        assert agent.of(Fetch)[0].params == {"plan": "x"}
        await eventually(lambda: agent.of(Release))
        release = agent.of(Release)[0]
        assert (release.result, release.imported_tokens) == ("imported", 29)
        assert len(release.digest) == 32


async def test_a_prefill_session_leaves_through_a_ring_much_smaller_than_itself(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, ring_bytes=2 * CHUNK * LAYER_TOKEN) as (_, agent, _):
        ids = tokens(100)
        assert agent.conn is not None
        agent.conn.send(PrefillStart("s", 1, 3), np.asarray(ids, dtype="<i4").tobytes())
        await eventually(lambda: agent.of(PrefillEnd))
        end = agent.of(PrefillEnd)[0]
        assert (end.status, end.records) == ("done", 13 * CHAIN_LAYERS)
        assert len(agent.records) == end.records
        for record, data in agent.records:
            rows = chain_kv(ids, record.layer)[:, record.token_start : record.token_end]
            assert data == rows.tobytes()


async def test_the_agent_knows_the_prefix_cache_also_after_it_was_restarted(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (engine, agent, _):
        first = agent.of(KvEvents)[0]
        assert first.cleared
        assert first.epoch == engine.epoch
        await ask(engine, tokens(17))
        names = {name.hex() for name in block_chain(tokens(17), 4)}
        await eventually(lambda: names <= agent.names)
        await agent.restart()
        await eventually(lambda: agent.of(KvEvents))
        assert agent.of(KvEvents)[0].cleared
        await eventually(lambda: names <= agent.names)
        await engine.reset_prefix_cache()
        await eventually(lambda: not agent.names)
        seqs = [m.seq for m in agent.of(KvEvents)]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


async def test_load_is_told_at_least_every_quarter_second_even_within_a_long_step(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (engine, agent, runner):
        inside, gate = threading.Event(), threading.Event()

        def wait(layer: int) -> None:
            inside.set()
            assert gate.wait(20)

        runner.on_layer = wait
        answer = asyncio.create_task(ask(engine, tokens(20)))
        await asyncio.to_thread(inside.wait, 10)
        agent.messages.clear()
        await eventually(lambda: len(agent.of(Stats)) >= 4)
        runner.on_layer = None
        gate.set()
        await answer
        times = [at for at, m in agent.messages if isinstance(m, Stats)][:4]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        # A quarter of a second by the clock; the rest is for a busy machine.
        assert max(gaps) < 0.5
        assert min(gaps) > 0.1


async def test_what_comes_during_a_step_is_in_the_load_as_soon_as_that_is_over(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (engine, agent, runner):
        inside, gate = threading.Event(), threading.Event()

        def wait(layer: int) -> None:
            inside.set()
            assert gate.wait(20)

        runner.on_layer = wait
        first = asyncio.create_task(ask(engine, tokens(CHUNK)))
        await asyncio.to_thread(inside.wait, 10)
        second = asyncio.create_task(ask(engine, tokens(CHUNK, 1)))
        await eventually(lambda: engine._commands)
        await eventually(lambda: agent.of(Stats)[-1].waiting == 2)
        queued = agent.of(Stats)[-1].queue_tokens
        assert queued >= 2 * CHUNK - 1, "also while it cannot say so itself"
        told: list[int] = []
        publish = engine._feed.publish

        def record(stats: EngineStats, *taken: int) -> None:
            told.append(stats.waiting)
            publish(stats, *taken)

        engine._feed.publish = record
        runner.on_layer = None
        gate.set()
        await asyncio.gather(first, second)
        assert told[0] == 1, "an engine that says it is idle gets everybody's next request"
        await eventually(lambda: (s := agent.of(Stats)[-1]).waiting == s.queue_tokens == 0)


async def test_load_changes_are_told_soon(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent, _):
        await ask(engine, tokens(40))
        last = agent.of(Stats)[-1]
        await eventually(lambda: agent.of(Stats)[-1].running == 0)
        assert last.total_blocks == 64
        assert last.prefill_token_s > 0


async def test_requests_go_on_when_the_agent_dies_under_them(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent, _):
        answer = asyncio.create_task(ask(engine, tokens(30), plan="x"))
        await eventually(lambda: agent.of(Fetch))
        await agent.restart()
        assert await answer == chain_answer(tokens(30), 6)
        assert engine.stats().kv_outcomes == {"agent_lost": 1}
        await eventually(lambda: engine.stats().port_connected and agent.of(Stats))
        agent.on_fetch = lambda fetch, prompt: agent.stage(fetch, prompt, fetch.want)
        assert await ask(engine, tokens(30, 1), plan="x") == chain_answer(tokens(30, 1), 6)
        assert engine.stats().kv_outcomes["staged"] == 1


async def test_an_engine_without_its_agent_serves_alone(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent, _):
        await agent.server.close()
        await eventually(lambda: not engine.stats().port_connected)
        assert await ask(engine, tokens(30), plan="x") == chain_answer(tokens(30), 6)
        assert engine.stats().kv_outcomes == {"no_agent": 1}
