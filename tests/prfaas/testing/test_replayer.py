"""The replayer at a bare port, between two real agents, and as a process."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas.errors import PrefillTimeout, ProtocolError
from prfaas.kvport import EngineConn, PortServer
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.settings import Settings
from prfaas.testing.kv_tape import KvTape, seeded_tape
from prfaas.testing.replayer import Replayed, ReplayEngine, seeded_prompt, serve
from prfaas.testing.waiting import eventually
from prfaas.transfer import PARAMS_VERSION, PlanStep, TransferParams, sign
from prfaas_connect.port.messages import (
    Fetch,
    FetchDone,
    KvEvents,
    PortMessage,
    PrefillCancel,
    PrefillEnd,
    PrefillStart,
    Record,
    Release,
    RingFree,
)
from remote_prefill.agent_main import AgentServer
from remote_prefill.prefill_main import PrefillServer

LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, (0, 1), 2, 8, "bfloat16"),))
RING_BYTES = 4096
KEY = b"transfer-key"


@pytest.fixture
def tape() -> KvTape:
    return seeded_tape(50, LAYOUT)


class BarePort:
    """An agent side that only collects what the engine says."""

    def __init__(self, path: Path) -> None:
        self.conn: EngineConn | None = None
        self.messages: asyncio.Queue[tuple[PortMessage, bytes]] = asyncio.Queue()
        self.server = PortServer(
            path,
            agent_name="bare",
            ring_bytes=RING_BYTES,
            staging_bytes=1 << 16,
            on_engine=self._on_engine,
        )

    async def _on_engine(self, conn: EngineConn) -> None:
        self.conn = conn
        async for item in conn:
            self.messages.put_nowait(item)

    async def next(self, kind: type[PortMessage]) -> tuple[Any, bytes]:
        """The next message of that type; others are passed over."""
        while True:
            message, blob = await asyncio.wait_for(self.messages.get(), 5)
            if isinstance(message, kind):
                return message, blob

    async def take(self, engine: ReplayEngine) -> None:
        """Start an engine and wait until it is here."""
        await asyncio.to_thread(engine.start)
        await self.next(KvEvents)

    def send(self, message: PortMessage, blob: bytes = b"") -> None:
        assert self.conn is not None
        self.conn.send(message, blob)


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[BarePort]:
    port = BarePort(tmp_path / "bare.sock")
    await port.server.start()
    yield port
    await port.server.close()


@contextmanager
def running(engine: ReplayEngine) -> Iterator[ReplayEngine]:
    try:
        yield engine
    finally:
        engine.close()


def start_message(tokens: int, send_from: int = 0) -> tuple[PrefillStart, bytes]:
    return PrefillStart("s", 1, send_from), seeded_prompt(tokens, 1).astype("<i4").tobytes()


async def test_an_export_is_the_tape_through_a_ring_that_is_smaller_than_it(
    bare: BarePort, tmp_path: Path, tape: KvTape
) -> None:
    tokens, send_from = 70, 5
    assert LAYOUT.session_bytes(0, tokens) > 2 * RING_BYTES
    with running(ReplayEngine(tmp_path / "bare.sock", tape, chunk_tokens=16)) as engine:
        await bare.take(engine)
        bare.send(*start_message(tokens, send_from))
        place = tape.start_of(seeded_prompt(tokens, 1))
        seen: list[tuple[int, int, int, int]] = []
        while len(seen) < 10:
            record, _ = await bare.next(Record)
            assert bare.conn is not None
            raw = np.frombuffer(bare.conn.ring, np.uint8)[record.offset :][: record.nbytes]
            begin, end = record.token_start, record.token_end
            assert tape.equals(raw, place, record.group, record.layer, begin, end)
            seen.append((record.chunk, record.layer, begin, end))
            bare.send(RingFree(1))
        end_message, _ = await bare.next(PrefillEnd)
    assert seen[:3] == [(0, 0, 5, 16), (0, 1, 5, 16), (1, 0, 16, 32)]
    assert seen[-1] == (4, 1, 64, 70)
    assert (end_message.status, end_message.records) == ("done", 10)
    counters = engine.counters()
    assert counters.exported_bytes == LAYOUT.session_bytes(send_from, tokens)
    assert counters.ring_wait_s > 0


async def test_a_cancelled_export_ends_although_the_ring_is_full(
    bare: BarePort, tmp_path: Path, tape: KvTape
) -> None:
    with running(ReplayEngine(tmp_path / "bare.sock", tape, chunk_tokens=16)) as engine:
        await bare.take(engine)
        bare.send(*start_message(200))
        await bare.next(Record)
        bare.send(PrefillCancel("s", 1))
        ended, _ = await bare.next(PrefillEnd)
        assert ended.status == "cancelled"


async def test_a_pace_is_kept(bare: BarePort, tmp_path: Path, tape: KvTape) -> None:
    tokens, seconds = 30, 0.2
    pace = LAYOUT.session_bytes(0, tokens) / seconds
    with running(ReplayEngine(tmp_path / "bare.sock", tape, bytes_per_s=pace)) as engine:
        await bare.take(engine)
        began = time.monotonic()
        bare.send(*start_message(tokens))
        await bare.next(PrefillEnd)
        assert time.monotonic() - began >= seconds


@pytest.mark.parametrize("flipped", [False, True])
async def test_a_fetch_compares_every_staged_byte_and_releases(
    bare: BarePort, tmp_path: Path, tape: KvTape, flipped: bool
) -> None:
    tokens, offset, chunk_tokens = 20, 512, 8
    with running(ReplayEngine(tmp_path / "bare.sock", tape)) as engine:
        await bare.take(engine)
        asked = asyncio.create_task(asyncio.to_thread(engine.fetch, {"plan": 1}, tokens, 9))
        fetch, blob = await bare.next(Fetch)
        assert (fetch.have, fetch.want, fetch.params) == (0, tokens, {"plan": 1})
        prompt = np.frombuffer(blob, "<i4").astype(np.int32)[:-1]
        assert bare.conn is not None
        staging = np.frombuffer(bare.conn.staging, np.uint8)
        for extent in LAYOUT.extents(0, tokens, chunk_tokens):
            raw = staging[offset + extent.offset :][: extent.nbytes]
            span = extent.span
            place = tape.start_of(prompt)
            tape.copy(raw, place, extent.group, extent.layer, span.start, span.end)
        staging[offset + 700] ^= flipped
        bare.send(FetchDone(fetch.session, "staged", "", tokens, offset, chunk_tokens))
        release, _ = await bare.next(Release)
        found = await asked
    assert (release.session, release.result) == (fetch.session, "imported")
    assert found.exact is not flipped
    assert (found.status, found.raw_bytes) == ("staged", LAYOUT.session_bytes(0, tokens))
    assert 0 < found.elapsed_s < 5
    assert engine.counters().engine_cpu_s > 0


async def test_a_refused_fetch_is_told_and_not_released(
    bare: BarePort, tmp_path: Path, tape: KvTape
) -> None:
    with running(ReplayEngine(tmp_path / "bare.sock", tape)) as engine:
        await bare.take(engine)
        asked = asyncio.create_task(asyncio.to_thread(engine.fetch, {}, 20, 9))
        fetch, _ = await bare.next(Fetch)
        bare.send(FetchDone(fetch.session, "local", "peer_unavailable", message="nobody"))
        found = await asked
    assert (found.status, found.reason, found.exact) == ("local", "peer_unavailable", False)
    assert found.raw_bytes == 0


def test_without_an_agent_it_says_so(
    tmp_path: Path, tape: KvTape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prfaas.testing.replayer.CONNECT_TIMEOUT_S", 0.1)
    with (
        running(ReplayEngine(tmp_path / "none.sock", tape)) as engine,
        pytest.raises(PrefillTimeout, match="no agent"),
    ):
        engine.start()


def test_unknown_commands_are_errors(tmp_path: Path, tape: KvTape) -> None:
    engine = ReplayEngine(tmp_path / "none.sock", tape)
    with pytest.raises(ProtocolError, match="'dance'"):
        serve(engine, iter(['{"do": "dance"}']), print)  # type: ignore[arg-type]


async def test_between_two_agents_the_pair_is_probed_and_kv_arrives_bit_for_bit(
    tmp_path: Path, tape: KvTape
) -> None:
    p_socket, d_socket = tmp_path / "p.sock", tmp_path / "d.sock"
    async with AsyncExitStack() as stack:
        p = PrefillServer(
            Settings.model_validate(
                {"prefill": {"peer": "fra", "instance": "p0", "socket": p_socket, "port": 0}}
            )
        )
        stack.push_async_callback(p.stop)
        address = f"127.0.0.1:{await p.start()}"
        peer = {"name": "fra", "instances": [{"name": "p0", "address": address}]}
        agent = {
            "socket": d_socket,
            "port": 0,
            "transfer_keys": [KEY.decode()],
            "peers": [peer],
            "probe_bytes": 0,
        }
        d = AgentServer(Settings.model_validate({"agent": agent}))
        stack.push_async_callback(d.stop)
        await d.start()
        path = tmp_path / "tape.npz"
        tape.save(path)
        prefill = stack.enter_context(running(ReplayEngine(p_socket, tape, chunk_tokens=16)))
        await asyncio.to_thread(prefill.start)
        command = ("-m", "prfaas.testing.replayer", "--socket", str(d_socket), "--tape", str(path))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            await eventually(lambda: d.agent.pool.ready_count == 1, within_s=20)
            command_line = {"do": "fetch", "params": signed("t1"), "tokens": 90, "seed": 4}
            process.stdin.write(json.dumps(command_line).encode() + b"\n")
            found = Replayed(**json.loads(await asyncio.wait_for(process.stdout.readline(), 20)))
            assert (found.status, found.tokens, found.exact) == ("staged", 90, True)
            process.stdin.close()
            assert await asyncio.wait_for(process.wait(), 10) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert prefill.counters().exported_sessions == 2  # the probe and the fetch


def signed(transfer_id: str) -> dict[str, Any]:
    params = TransferParams(
        version=PARAMS_VERSION,
        transfer_id=transfer_id,
        plan=(PlanStep("fra", "p0"),),
        on_failure="reject",
        quality="exact",
        deadline_s=20.0,
        salt="",
        expires=time.time() + 60,
    )
    return sign(params, KEY).to_dict()
