"""Layers leave as they are computed, whatever the ring has room for, and nothing leaves twice."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from prfaas_connect.port.layout import GroupKind, KvLayout, LayerGroup
from prfaas_connect.port.messages import PortError, PortMessage, Record
from prfaas_connect.port.ring import RingAllocator
from prfaas_connect.vllm.copies import Copies, HostCopies
from prfaas_connect.vllm.layouts import LAYOUTS, Bytes, HeadRange, PagedKv
from prfaas_connect.vllm.producer_plan import ExportOpen, ExportStep, PrefillPlan
from prfaas_connect.vllm.producer_worker import ProducerWorker

LAYERS, HEADS, DIM, CHUNK, BLOCK, BLOCKS = 3, 4, 8, 64, 32, 20
LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, tuple(range(LAYERS)), HEADS, DIM, "float32"),))
TOKEN_BYTES = 2 * HEADS * DIM * 4
RECORD = CHUNK * TOKEN_BYTES


class Port:
    """A rank's connected port: a ring, and the records with the bytes they had when sent."""

    def __init__(self, capacity: int) -> None:
        self.memory = np.zeros(capacity, np.uint8)
        self.allocator = RingAllocator(capacity)
        self.sent: list[tuple[Record, bytes]] = []
        self.connection = ""
        self.up = True

    @property
    def port(self) -> Any:
        return self if self.up else None

    def use(self, connection: str) -> None:
        self.connection = connection or self.connection

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> bool:
        assert isinstance(message, Record)
        end = message.offset + message.nbytes
        self.sent.append((message, self.memory[message.offset : end].tobytes()))
        return True

    def ring_reserve(self, nbytes: int) -> int | None:
        return self.allocator.reserve(nbytes)

    def ring(self, offset: int, nbytes: int) -> Bytes:
        if not self.up:
            raise PortError("gone")
        return self.memory[offset : offset + nbytes]


class Site:
    """One rank with a cache that a model writes, and the truth about it."""

    def __init__(
        self, capacity: int = 1 << 24, heads: HeadRange | None = None, copies: Copies | None = None
    ) -> None:
        self.heads = heads or HeadRange(0, HEADS, HEADS)
        self.port = Port(capacity)
        self.layers = {
            layer: PagedKv(
                torch.zeros(BLOCKS, self.heads.count, BLOCK, 2 * DIM),
                LAYOUTS["cpu"], self.heads, DIM,
            )
            for layer in range(LAYERS)
        }  # fmt: skip
        self.slept = 0
        self.worker = ProducerWorker(
            LAYOUT, self.layers, self.port, self.heads, copies or HostCopies(),
            chunk_tokens=CHUNK, sleep=self._sleep,
        )  # fmt: skip
        self.tables: dict[str, list[int]] = {}

    def _sleep(self, seconds: float) -> None:
        self.slept += 1

    def truth(self, name: str, layer: int, run: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((name, layer, run)) % 2**31)
        return torch.randn(2, 2048, self.heads.count, DIM, generator=generator)

    def compute(
        self, plan: PrefillPlan, written: dict[str, tuple[int, int]], hooks: bool = True,
        run: int = 0,
    ) -> set[str]:  # fmt: skip
        """One engine step: the plan, the model layer by layer, the end of the step."""
        for step in plan.steps:
            if step.replaces:
                self.tables[step.request_id] = []
            self.tables.setdefault(step.request_id, []).extend(step.block_ids)
        self.worker.follow(plan)
        for layer in range(LAYERS):
            for name, (start, end) in written.items():
                data = self.truth(name, layer, run)[:, start:end]
                self.layers[layer].write(self.tables[name], start, end, data)
            if hooks:
                self.worker.layer_saved(layer)
        self.worker.saved()
        return self.worker.finished()

    def records(self) -> list[tuple[Record, bytes]]:
        sent, self.port.sent = self.port.sent, []
        return sent

    def assert_whole(self, sent: list[tuple[Record, bytes]], name: str, end: int) -> None:
        """Every tensor of [0, end) has come once, with the right bytes."""
        seen = set()
        for record, raw in sent:
            place = (record.layer, record.token_start, record.token_end)
            assert place not in seen
            seen.add(place)
            want = self.truth(name, record.layer)[:, record.token_start : record.token_end]
            assert raw == want.contiguous().view(torch.uint8).numpy().tobytes()
            assert (record.head_start, record.head_end) == (self.heads.start, self.heads.end)
            assert record.chunk == record.token_start // CHUNK
        spans = [(at, min(at + CHUNK, end)) for at in range(0, end, CHUNK)]
        assert seen == {(layer, *span) for layer in range(LAYERS) for span in spans}


def opened(name: str = "a", end: int = 150, cached: int = 0, send_from: int = 0) -> ExportOpen:
    return ExportOpen(name, f"s-{name}", 1, send_from, end, cached)


def plan(*steps: ExportStep, **fields: Any) -> PrefillPlan:
    return PrefillPlan(connection="c1", steps=list(steps), **fields)


def test_each_layer_leaves_in_its_own_hook_and_the_end_is_told_once() -> None:
    site = Site()
    site.worker.follow(plan(ExportStep("a", [3, 1], 64), opens=[opened()]))
    site.tables["a"] = [3, 1]
    for layer in range(LAYERS):
        site.layers[layer].write([3, 1], 0, 64, site.truth("a", layer)[:, :64])
        site.worker.layer_saved(layer)
        assert len(site.port.sent) == layer + 1
    site.worker.saved()
    assert site.worker.finished() == set()
    site.compute(plan(ExportStep("a", [7, 2, 9], 150)), {"a": (64, 150)})
    assert site.compute(plan(kept=["a"], idle=True), {}) == {"a"}
    assert site.compute(plan(idle=True), {}) == set()
    site.assert_whole(site.records(), "a", 150)
    assert len(site.worker) == 0


def test_layers_without_a_hook_are_swept_at_the_end_of_the_step() -> None:
    site = Site()
    site.compute(plan(ExportStep("a", [3, 1, 4], 65), opens=[opened(end=65)]), {"a": (0, 65)},
                 hooks=False)  # fmt: skip
    site.assert_whole(site.records(), "a", 65)


def test_what_the_prefix_cache_had_is_read_from_the_pool_and_marked() -> None:
    site = Site()
    table = [3, 1, 4, 2, 5]
    for layer in range(LAYERS):
        site.layers[layer].write(table, 0, 96, site.truth("a", layer)[:, :96])
    site.compute(plan(ExportStep("a", table, 150), opens=[opened(cached=96)]), {"a": (96, 150)})
    sent = site.records()
    assert {(r.token_end, r.cached) for r, _ in sent} == {(64, True), (128, False), (150, False)}
    site.assert_whole(sent, "a", 150)


def test_only_what_was_asked_for_leaves() -> None:
    site = Site()
    table = [3, 1, 4, 2, 5]
    site.compute(plan(ExportStep("a", table, 150), opens=[opened(send_from=70)]), {"a": (0, 150)})
    spans = {(record.token_start, record.token_end) for record, _ in site.records()}
    assert spans == {(70, 128), (128, 150)}
    assert site.compute(plan(kept=["a"], idle=True), {}) == {"a"}


def test_a_full_ring_makes_a_backlog_that_leaves_as_room_comes() -> None:
    site = Site(capacity=2 * RECORD)
    table = [3, 1, 4, 2, 5]
    site.compute(plan(ExportStep("a", table, 150), opens=[opened()]), {"a": (0, 150)})
    sent = site.records()
    assert len(sent) == 2
    assert site.compute(plan(kept=["a"], idle=True), {}) == set()
    assert site.slept == 1
    done: set[str] = set()
    for _ in range(20):
        fresh = site.records() if site.port.sent else []
        sent += fresh
        site.port.allocator.free(min(1, len(site.port.allocator._regions)))
        done |= site.compute(plan(idle=True), {})
    site.assert_whole(sent + site.records(), "a", 150)
    assert done == {"a"}


def test_preempted_blocks_are_not_read_and_the_rest_is_computed_anew() -> None:
    site = Site(capacity=2 * RECORD)
    table = [3, 1, 4, 2]
    site.compute(plan(ExportStep("a", table, 128), opens=[opened()]), {"a": (0, 128)})
    sent = site.records()
    assert len(sent) == 2
    # Preempted: its blocks are another's in the very next step.
    site.port.allocator.free(2)
    site.tables["b"] = table
    site.compute(plan(held=["a"]), {"b": (0, 128)})
    assert site.records() == []
    site.compute(plan(ExportStep("a", [7, 8], 64, replaces=True)), {"a": (0, 64)})
    sent += site.records()
    site.port.allocator.free(len(site.port.allocator._regions))
    site.compute(plan(ExportStep("a", [9, 10, 11], 150)), {"a": (64, 150)})
    for _ in range(8):
        sent += site.records()
        site.port.allocator.free(len(site.port.allocator._regions))
        site.compute(plan(kept=["a"] if _ == 0 else [], idle=True), {})
    site.assert_whole(sent + site.records(), "a", 150)


def test_nothing_is_read_of_what_was_dropped_and_its_blocks_are_given_back() -> None:
    site = Site(capacity=RECORD)
    table = [3, 1, 4, 2, 5]
    site.compute(plan(ExportStep("a", table, 150), opens=[opened()]), {"a": (0, 150)})
    assert len(site.records()) == 1
    site.port.allocator.free(1)
    assert site.compute(plan(drops=["a"], kept=["a"], idle=True), {}) == {"a"}
    assert (site.records(), len(site.worker)) == ([], 0)
    # Dropped before its end: vLLM does not keep its blocks and is told nothing.
    site.compute(plan(ExportStep("b", table, 64), opens=[opened("b", 70)]), {"b": (0, 64)})
    assert site.compute(plan(drops=["b"]), {}) == set()


def test_another_connection_voids_all_and_still_gives_blocks_back() -> None:
    site = Site(capacity=RECORD)
    site.compute(plan(ExportStep("a", [3, 1, 4], 65), opens=[opened(end=65)]), {"a": (0, 65)})
    site.records()
    site.port.allocator.free(1)
    other = PrefillPlan(connection="c2", kept=["a"], idle=True)
    assert site.compute(other, {}) == {"a"}
    assert site.records() == []


def test_without_an_agent_everything_waits() -> None:
    site = Site()
    site.port.up = False
    site.compute(plan(ExportStep("a", [3, 1], 64), opens=[opened(end=64)]), {"a": (0, 64)})
    assert site.records() == []
    site.port.up = True
    assert site.compute(plan(kept=["a"], idle=True), {}) == {"a"}
    site.assert_whole(site.records(), "a", 64)


def test_a_rank_sends_its_heads_and_a_copy_of_heads_sends_nothing() -> None:
    site = Site(heads=HeadRange(2, 4, HEADS))
    site.compute(plan(ExportStep("a", [3, 1], 64), opens=[opened(end=64)]), {"a": (0, 64)})
    site.assert_whole(site.records(), "a", 64)
    copy = Site(heads=HeadRange(2, 3, HEADS, first_copy=False))
    copy.compute(plan(ExportStep("a", [3, 1], 64), opens=[opened(end=64)]), {"a": (0, 64)})
    assert copy.compute(plan(kept=["a"], idle=True), {}) == {"a"}
    assert copy.records() == []


class SlowCopies:
    """Copies as an accelerator makes them: begun now, done when it pleases."""

    def __init__(self) -> None:
        self.begun: deque[SlowCopy] = deque()

    def start(self, kv: PagedKv, table: list[int], start: int, end: int, ring: Bytes) -> SlowCopy:
        copy = SlowCopy(kv, list(table), start, end, ring)
        self.begun.append(copy)
        return copy


class SlowCopy:
    def __init__(self, kv: PagedKv, table: list[int], start: int, end: int, ring: Bytes) -> None:
        self.kv, self.table, self.start, self.end, self.ring = kv, table, start, end, ring
        self.ready = self.fenced = False

    def done(self) -> bool:
        if self.ready and not self.fenced:
            self.kv.export(self.table, self.start, self.end, self.ring)
        return self.ready

    def fence(self) -> None:
        self.kv.export(self.table, self.start, self.end, self.ring)
        self.fenced = True


def test_copies_that_take_time_leave_in_order_and_are_fenced_before_blocks_change_hands() -> None:
    copies = SlowCopies()
    site = Site(copies=copies)
    table = [3, 1, 4, 2, 5]
    site.compute(plan(ExportStep("a", table, 128), opens=[opened(end=150)]), {"a": (0, 128)})
    assert len(copies.begun) == 2 * LAYERS
    assert site.records() == []
    copies.begun[1].ready = True
    site.compute(plan(), {})
    assert site.records() == []
    copies.begun[0].ready = True
    site.compute(plan(), {})
    sent = site.records()
    assert len(sent) == 2
    # Preempted: another's KV is written to the same blocks in the step that holds it.
    site.tables["b"] = table
    site.compute(plan(held=["a"]), {"b": (0, 128)})
    assert all(copy.fenced for copy in list(copies.begun)[2:])
    for copy in copies.begun:
        copy.ready = True
    site.compute(plan(), {})
    sent += site.records()
    assert len(sent) == 2 * LAYERS
    site.assert_whole(sent, "a", 128)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_two_at_once_keep_their_blocks_apart(order: list[int]) -> None:
    site = Site()
    names = ["a", "b"]
    opens = [opened(name, end=64) for name in names]
    steps = [ExportStep("a", [3, 1], 64), ExportStep("b", [2, 6], 64)]
    chosen = [steps[index] for index in order]
    site.compute(plan(*chosen, opens=opens), {"a": (0, 64), "b": (0, 64)})
    sent = site.records()
    for name in names:
        site.assert_whole([item for item in sent if item[0].session == f"s-{name}"], name, 64)
