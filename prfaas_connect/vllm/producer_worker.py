"""Prefill side in a vLLM worker: each layer's KV leaves for the ring as soon as it is computed.

All of it happens on the worker's own thread, in vLLM's hooks. What finds no room in the ring stays
in a backlog and leaves in later hooks; the blocks it lies in are kept meanwhile, by the running
request and then by vLLM until `finished` names the request.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prfaas_connect.port.layout import ChunkSpan, KvLayout, chunk_spans
from prfaas_connect.port.messages import PortError, PortMessage, Record
from prfaas_connect.vllm.copies import Copies, Copy
from prfaas_connect.vllm.layouts import HeadRange, PagedKv
from prfaas_connect.vllm.producer_plan import ExportOpen, ExportStep, PrefillPlan

log = logging.getLogger(__name__)

STEP_BYTES = 16 << 20
"""What may leave after a step's last layer, or in a step that computes nothing."""
FULL_RING_WAIT_S = 0.002
"""A step with nothing to compute waits so long where the ring is full: vLLM steps without pause
while blocks are kept, and the agent needs the core.
"""


class Ring(Protocol):
    """What is needed of a connected `EnginePort`."""

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> bool: ...

    def ring_reserve(self, nbytes: int) -> int | None: ...

    def ring(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]: ...


class RankPort(Protocol):
    """What is needed of `WorkerPort`."""

    connection: str

    def use(self, connection: str) -> None: ...

    @property
    def port(self) -> Ring | None: ...


@dataclass(slots=True, eq=False)
class _Export:
    opened: ExportOpen
    spans: list[ChunkSpan]
    blocks: list[int] = field(default_factory=list)
    computed_end: int = 0
    queued: dict[int, int] = field(default_factory=dict)
    """By layer: how many of `spans`, from the first on, are in the backlog or have left it."""
    left: dict[int, int] = field(default_factory=dict)
    """By layer: how many have left it."""
    sent: int = 0
    held: bool = False

    @property
    def request_id(self) -> str:
        return self.opened.request_id


@dataclass(slots=True, eq=False)
class _Item:
    export: _Export
    span: ChunkSpan
    layer: int


@dataclass(slots=True, eq=False)
class _Leaving:
    """Its bytes are on their way to the place reserved for them."""

    ring: Ring
    item: _Item
    copy: Copy
    record: Record


class ProducerWorker:
    """Owns the exports of one rank; the model runner's thread calls it.

    `layers` are the paged tensors by model layer. A rank whose heads another one exports too sends
    nothing.
    """

    def __init__(
        self,
        layout: KvLayout,
        layers: Mapping[int, PagedKv],
        port: RankPort,
        heads: HeadRange,
        copies: Copies,
        *,
        chunk_tokens: int,
        step_bytes: int = STEP_BYTES,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._layers = layers
        self._order = sorted(layers)
        self._groups = {
            layer: index for index, group in enumerate(layout.groups) for layer in group.layers
        }
        self._port = port
        self._heads = heads
        self._copies = copies
        self._chunk_tokens = chunk_tokens
        self._step_bytes = step_bytes
        self._sleep = sleep
        self._connection = ""
        self._exports: dict[str, _Export] = {}
        self._stepping: list[_Export] = []
        self._backlog: deque[_Item] = deque()
        self._leaving: deque[_Leaving] = deque()
        self._kept: set[str] = set()
        """Requests that vLLM keeps the blocks of until they are named as sent."""
        self._idle = False

    def __len__(self) -> int:
        return len(self._exports)

    def follow(self, plan: PrefillPlan) -> None:
        """Take over what the scheduler says; before anything is computed in this step."""
        self._port.use(plan.connection)
        if plan.connection and plan.connection != self._connection:
            self._void()
            self._connection = plan.connection
        for request_id in plan.drops:
            self._drop(self._exports.pop(request_id, None))
        for export in self._exports.values():
            export.held = False
        for request_id in plan.held:
            held = self._exports.get(request_id)
            if held is not None:
                held.held = True
                self._fence(held)
        for opened in plan.opens:
            spans = chunk_spans(opened.send_from, opened.token_end, self._chunk_tokens)
            self._exports[opened.request_id] = _Export(opened, spans)
        self._stepping = []
        for step in plan.steps:
            export_or_none = self._exports.get(step.request_id)
            if export_or_none is not None:
                self._advance(export_or_none, step)
        self._kept.update(plan.kept)
        self._idle = plan.idle

    def layer_saved(self, layer: int) -> None:
        """The model has written this step's KV of `layer`.

        About two records may leave for each that comes, so that a backlog shrinks while the model
        runs.
        """
        if not self._stepping:
            return
        self._drain(2 * sum(self._queue(export, layer) for export in self._stepping))

    def saved(self) -> None:
        """All layers of this step are written, those without a hook of their own among them."""
        for export in self._stepping:
            for layer in self._order:
                self._queue(export, layer)
        self._stepping = []
        self._drain(self._step_bytes)

    def finished(self) -> set[str]:
        """Requests whose blocks nobody reads any more, each named once; called in every step."""
        if not (self._kept or self._backlog or self._leaving):
            return set()
        self._drain(self._step_bytes)
        sent = {name for name in self._kept if self._over(self._exports.get(name))}
        self._kept -= sent
        for name in sent:
            self._exports.pop(name, None)
        if self._idle and not sent and (self._backlog or self._leaving):
            self._sleep(FULL_RING_WAIT_S)
        return sent

    # --- one export ---

    def _advance(self, export: _Export, step: ExportStep) -> None:
        if step.replaces:  # Preempted: what has not left is computed anew, in these blocks.
            self._drop(export)
            export.queued = dict(export.left)
            export.blocks = list(step.block_ids)
        else:
            export.blocks.extend(step.block_ids)
        export.computed_end = step.computed_end
        self._stepping.append(export)

    def _queue(self, export: _Export, layer: int) -> int:
        """Put what is computed of one layer behind the backlog; its bytes."""
        if not self._heads.first_copy:
            return 0
        at = export.queued.get(layer, 0)
        nbytes = 0
        while at < len(export.spans) and export.spans[at].end <= export.computed_end:
            self._backlog.append(_Item(export, export.spans[at], layer))
            nbytes += export.spans[at].tokens * self._layers[layer].token_bytes
            at += 1
        export.queued[layer] = at
        return nbytes

    def _over(self, export: _Export | None) -> bool:
        if export is None or not self._heads.first_copy:
            return True
        return export.sent == len(export.spans) * len(self._order)

    def _drop(self, export: _Export | None) -> None:
        """Read nothing more of it."""
        if export is None:
            return
        self._fence(export)
        self._backlog = deque(item for item in self._backlog if item.export is not export)

    def _fence(self, export: _Export) -> None:
        for leaving in self._leaving:
            if leaving.item.export is export:
                leaving.copy.fence()

    def _void(self) -> None:
        """Another connection: what belongs to the one before goes nowhere."""
        for leaving in self._leaving:
            leaving.copy.fence()
        self._leaving.clear()
        self._backlog.clear()
        self._exports.clear()

    # --- out ---

    def _drain(self, budget_bytes: int) -> None:
        """Move from the backlog until the ring is full or about `budget_bytes` are moved."""
        self._send_ready()
        ring = self._port.port
        if ring is None or self._port.connection != self._connection:
            return
        waiting: list[_Item] = []
        while self._backlog and budget_bytes > 0:
            item = self._backlog.popleft()
            if item.export.held:
                waiting.append(item)
                continue
            nbytes = self._start(ring, item)
            if not nbytes:
                self._backlog.appendleft(item)
                break
            budget_bytes -= nbytes
        self._backlog.extendleft(reversed(waiting))
        self._send_ready()

    def _start(self, ring: Ring, item: _Item) -> int:
        """Reserve room and start to copy; the bytes, 0 where there is no room or no agent."""
        export, span, kv = item.export, item.span, self._layers[item.layer]
        nbytes = span.tokens * kv.token_bytes
        try:
            offset = ring.ring_reserve(nbytes)
            if offset is None:
                return 0
            place = ring.ring(offset, nbytes)
        except PortError:  # The agent is gone; the scheduler hears of it and drops all exports.
            return 0
        copy = self._copies.start(kv, export.blocks, span.start, span.end, place)
        export.left[item.layer] = export.left.get(item.layer, 0) + 1
        opened = export.opened
        record = Record(
            session=opened.session, epoch=opened.epoch, chunk=span.index,
            group=self._groups[item.layer], layer=item.layer,
            token_start=span.start, token_end=span.end,
            head_start=self._heads.start, head_end=self._heads.end,
            offset=offset, nbytes=nbytes, cached=span.end <= opened.cached,
        )  # fmt: skip
        self._leaving.append(_Leaving(ring, item, copy, record))
        return nbytes

    def _send_ready(self) -> None:
        """Records leave in the order of their places in the ring."""
        while self._leaving and self._leaving[0].copy.done():
            leaving = self._leaving.popleft()
            leaving.ring.send(leaving.record)
            leaving.item.export.sent += 1
