"""States between agents: named by the probe, resumed at checkpoints, on one grid only."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prfaas.clock import SYSTEM_CLOCK
from prfaas.codecs import RAW, CodecSet
from prfaas.errors import IncompatibleLayout, PeerUnavailable, PrfaasError
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.ledger import Ledger, Piece, piece_digest
from prfaas.limits import Limits
from prfaas.placement import StagingMap
from prfaas.session_messages import SessionOpen
from prfaas.snapshot import Outcome
from prfaas.transfer import TransferParams
from prfaas_connect.port.messages import Fetch, FetchDone, Release
from remote_prefill.fetch import FetchContext, FetchJob
from remote_prefill.metrics import AgentMetrics
from remote_prefill.numeric_probe import compare, probe_map
from remote_prefill.receiver import ReceiverTimes
from remote_prefill.staging import StagingPool

LAYOUT = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0,), 1, 4, "float32"),
        LayerGroup(GroupKind.RECURRENT, (1, 2), 2, 2, "float32", state_dim=3),
    )
)
"""32 bytes of KV for each token, 96 of states: a checkpoint before the end needs 30 tokens."""
GRID, WANT = 8, 90
CHECKPOINTS = LAYOUT.checkpoints(0, WANT, GRID)


def test_the_grid_has_the_checkpoints_that_these_tests_speak_of() -> None:
    assert CHECKPOINTS == [32, 64, 90]


def test_the_probe_names_the_layer_whose_state_differs() -> None:
    def filled() -> StagingMap:
        made = probe_map(LAYOUT, 64)
        for extent in LAYOUT.extents(0, 64, 64):
            made.tensor(extent)[:] = np.frombuffer(
                np.linspace(1, 2, extent.nbytes // 4, dtype="<f4").tobytes(), np.uint8
            ).reshape(made.tensor(extent).shape)
        return made

    mine, theirs = filled(), filled()
    assert compare(mine, theirs, 0.0) == 0
    places = {e.layer: e for e in LAYOUT.extents(0, 64, 64)}
    theirs.tensor(places[2]).reshape(-1).view("<f4")[5] += 3.0
    with pytest.raises(IncompatibleLayout, match=r"layers\[2\]\.state differs") as caught:
        compare(mine, theirs, 1e-3)
    assert caught.value.field == "layers[2].state"


class FakeLink:
    """An instance that brings its first `tensors` and then fails, or all of them."""

    def __init__(self, name: str, *, chunk_tokens: int = GRID, tensors: int | None = None) -> None:
        self.name = self.instance = name
        self.peer = "p"
        self.asked: list[int] = []
        self.suspected: list[str] = []
        self._chunk_tokens = chunk_tokens
        self._tensors = tensors

    def require_ready(self) -> Any:
        return SimpleNamespace(model="m", chunk_tokens=self._chunk_tokens, engine_epoch="e")

    def suspect(self, error: PrfaasError) -> None:
        self.suspected.append(error.kind)

    async def fetch(
        self, request: SessionOpen, *, staging: StagingMap, watch: Any, **_: object
    ) -> None:
        self.asked.append(request.send_from)
        ledger = Ledger(LAYOUT, request.send_from, request.token_count, self._chunk_tokens)
        wire_bytes = 0 if self._tensors == 0 else 1
        machine = SimpleNamespace(ledger=ledger, wire_bytes=wire_bytes, seal=None, carried={})
        watch(SimpleNamespace(machine=machine, times=ReceiverTimes(), hidden_wire_bytes=0))
        extents = list(LAYOUT.extents(ledger.start, ledger.end, self._chunk_tokens))
        for extent in extents[: self._tensors]:
            heads = LAYOUT.groups[extent.group].kv_heads
            span = extent.span
            piece = Piece(span.index, extent.layer, extent.group, span.start, span.end, 0, heads)
            raw = np.full(extent.nbytes, span.end % 251, dtype=np.uint8)
            assert ledger.claim(piece)
            staging.scatter(piece, raw)
            ledger.commit(piece, piece_digest(raw), extent.nbytes)
        if self._tensors is not None:
            raise PeerUnavailable(f"{self.name} is gone")


class Rig:
    """One fetch over fake links; what the engine is told and what the outcome is."""

    def __init__(self, *links: FakeLink) -> None:
        self.sent: asyncio.Queue[FetchDone] = asyncio.Queue()
        self.outcomes: list[Outcome] = []
        self.memory = np.zeros(1 << 14, dtype=np.uint8)
        conn = SimpleNamespace(layout=LAYOUT, send=self.sent.put_nowait, close=lambda: None)
        context = FetchContext(
            conn=conn,  # type: ignore[arg-type]
            staging=StagingPool(memoryview(self.memory), 4),
            limits=Limits(),
            metrics=AgentMetrics(),
            clock=SYSTEM_CLOCK,
            hold_until_sealed=False,
            codecs=CodecSet([RAW]),
            recompute_s=lambda uncached, cached: None,
            slower_by=2.0,
            changed=lambda: None,
            ended=lambda _, outcome: self.outcomes.append(outcome),
        )
        params = TransferParams(1, "t", (), "local", "exact", 10.0, "", 0.0)
        fetch = Fetch("s", {}, have=0, want=WANT, uncached=WANT)
        self.job = FetchJob(fetch, bytes(4 * (WANT + 1)), params, list(links), context)  # type: ignore[arg-type]

    async def done(self) -> FetchDone:
        self.job.start()
        return await asyncio.wait_for(self.sent.get(), 5)


def tensors_before(token: int) -> int:
    return sum(1 for e in LAYOUT.extents(0, WANT, GRID) if e.span.end <= token)


async def test_the_next_instance_goes_on_from_the_last_whole_checkpoint() -> None:
    first = FakeLink("p/1", tensors=tensors_before(64) - 1)
    second = FakeLink("p/2")
    rig = Rig(first, second)
    done = await rig.done()
    assert (done.status, done.token_end, done.chunk_tokens) == ("staged", WANT, GRID)
    assert (first.asked, second.asked) == ([0], [32])
    for extent in LAYOUT.extents(0, WANT, GRID):
        at = done.staging_offset + extent.offset
        assert (rig.memory[at : at + extent.nbytes] == extent.span.end % 251).all()
    await rig.job.release(Release("s", "imported", WANT))


async def test_the_digest_of_an_import_covers_kv_and_states_up_to_its_end() -> None:
    rig = Rig(FakeLink("p/1", tensors=tensors_before(64)))
    done = await rig.done()
    assert (done.status, done.token_end) == ("partial", 64)
    nbytes = LAYOUT.extent_bytes(0, 64, GRID)
    assert nbytes == 64 * 32 + 2 * 96
    digest = hashlib.blake2b(rig.memory[:nbytes].tobytes(), digest_size=16).hexdigest()
    await rig.job.release(Release("s", "imported", 64, digest))
    assert [(o.status, o.received_tokens) for o in rig.outcomes] == [("partial", 64)]


async def test_an_instance_with_other_checkpoints_does_not_go_on_with_what_is_staged() -> None:
    first = FakeLink("p/1", tensors=tensors_before(64))
    second = FakeLink("p/2", chunk_tokens=2 * GRID)
    rig = Rig(first, second)
    done = await rig.done()
    assert (done.status, done.token_end, done.reason) == ("partial", 64, "incompatible_layout")
    assert second.asked == []
    await rig.job.release(Release("s", "imported", 64))


async def test_where_nothing_has_come_yet_any_grid_will_do() -> None:
    second = FakeLink("p/2", chunk_tokens=2 * GRID)
    rig = Rig(FakeLink("p/1", tensors=0), second)
    done = await rig.done()
    assert (done.status, done.token_end, done.chunk_tokens) == ("staged", WANT, 2 * GRID)
    for extent in LAYOUT.extents(0, WANT, 2 * GRID):
        at = done.staging_offset + extent.offset
        assert (rig.memory[at : at + extent.nbytes] == extent.span.end % 251).all()
    await rig.job.release(Release("s", "imported", WANT))


async def test_what_ends_before_the_first_checkpoint_is_of_no_use() -> None:
    rig = Rig(FakeLink("p/1", tensors=tensors_before(32) - 1))
    done = await rig.done()
    assert (done.status, done.reason) == ("local", "peer_unavailable")
