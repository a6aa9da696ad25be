"""What the engine asks of a model, and the torch model behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from local_engine.kv.attention import PagedKv, Part, Workspace
from local_engine.kv.pool import KvPool
from local_engine.kv.states import NO_SLOT
from local_engine.kv.table import BlockTable
from local_engine.models.base import ForwardBatch, SeqSlice
from local_engine.models.llama import LlamaModel
from local_engine.sampler import Drawn, TokenDraw, draw_tokens

# Called with a layer's index as soon as the KV of the whole chunk in that layer is in the pool.
LayerDone = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + len(token_ids)) of one sequence, whose earlier KV is in the pool.

    `table` has blocks for all of them; slot `state` has the states after the tokens before, and
    gets those after the last one.
    """

    token_ids: Sequence[int]
    start: int
    table: BlockTable
    state: int = NO_SLOT

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence's share of a decode step: its newest token, at `position`."""

    token_id: int
    position: int
    table: BlockTable
    draw: TokenDraw
    state: int = NO_SLOT


class ModelRunner(Protocol):
    """Computes KV into the pool it was built with, and next tokens; called by one thread only."""

    def prefill_chunk(self, chunk: PrefillChunk, on_layer: LayerDone | None = None) -> None:
        """Compute and store the chunk's KV in every layer. Draws no token."""

    def decode(self, rows: Sequence[DecodeRow]) -> list[Drawn]:
        """Store the KV of every row's token and draw the token that follows each."""


class TorchRunner:
    """Runs a model over a pool; its owner drops it, nothing to close."""

    def __init__(self, model: LlamaModel, pool: KvPool) -> None:
        self._model = model
        self._pool = pool
        self._workspace = Workspace(pool, model.dtype)
        self._padded = pool.device.type != "cpu"
        self._no_rows = torch.empty(0, dtype=torch.int64, device=pool.device)

    def prefill_chunk(self, chunk: PrefillChunk, on_layer: LayerDone | None = None) -> None:
        part = Part(chunk.table, 0, len(chunk.token_ids), chunk.start, chunk.state)
        batch, kv = self._batch(chunk.token_ids, [part])
        hook = None if on_layer is None else lambda layer, _k, _v: on_layer(layer)
        self._model.forward(batch, kv, hook, rows=self._no_rows)
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)  # The caller measures how long it took.

    def decode(self, rows: Sequence[DecodeRow]) -> list[Drawn]:
        return draw_tokens(self.logits(rows), [row.draw for row in rows])

    def logits(self, rows: Sequence[DecodeRow]) -> Tensor:
        """Next-token logits, fp32 [rows, vocab]; stores the KV of every row's token."""
        parts = [
            Part(row.table, index, 1, row.position, row.state) for index, row in enumerate(rows)
        ]
        batch, kv = self._batch([row.token_id for row in rows], parts)
        return self._model.logits(self._model.forward(batch, kv))

    def _batch(
        self, token_ids: Sequence[int], parts: Sequence[Part]
    ) -> tuple[ForwardBatch, PagedKv]:
        device = self._pool.device
        positions = [p for part in parts for p in range(part.ctx_len, part.total)]
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            seqs=tuple(
                SeqSlice(part.q_start, part.q_len, part.ctx_len, part.table.slots(0, part.total))
                for part in parts
            ),
        )
        return batch, PagedKv(self._pool, parts, self._workspace, padded=self._padded)
