"""What the engine asks of a model, and the torch model behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from local_engine.kv.table import BlockTable
from local_engine.sampler import TokenDraw

# Called with a layer's index as soon as the KV of the whole chunk in that layer is in the pool.
LayerDone = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + len(token_ids)) of one sequence, whose earlier KV is in the pool.

    `table` has blocks for all of them.
    """

    token_ids: Sequence[int]
    start: int
    table: BlockTable

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


class ModelRunner(Protocol):
    """Computes KV into the pool it was built with, and next tokens; called by one thread only."""

    def prefill_chunk(self, chunk: PrefillChunk, on_layer: LayerDone | None = None) -> None:
        """Compute and store the chunk's KV in every layer. Draws no token."""

    def decode(self, rows: Sequence[DecodeRow]) -> list[int]:
        """Store the KV of every row's token and draw the token that follows each."""
