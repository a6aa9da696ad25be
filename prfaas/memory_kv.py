"""KV that lies in memory as a source; a `StagingMap` over memory is the sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prfaas.ledger import Piece
from prfaas.placement import StagingMap
from prfaas.session_messages import PrefillReport


@dataclass(slots=True)
class MemoryRecord:
    """One whole tensor, a view of the memory. `done` only counts: nothing is waiting for it."""

    piece: Piece
    raw: npt.NDArray[np.uint8]
    cached: bool
    codec: str = ""
    finished: bool = field(default=False, init=False)

    def done(self) -> None:
        self.finished = True


class MemorySource:
    """A `KvSource` of tokens [start, kv.end) out of `kv`, which it borrows; in wire order, unless
    `pieces` says another. Nothing to close.
    """

    def __init__(
        self,
        kv: StagingMap,
        start: int | None = None,
        *,
        pieces: Sequence[Piece] | None = None,
        cached: bool = True,
    ) -> None:
        """Raises ValueError where the session's tensors are not those of `kv`: it has to start
        with it or with one of its chunks.
        """
        self.start = kv.start if start is None else start
        if self.start != kv.start and self.start % kv.chunk_tokens:
            raise ValueError(f"token {self.start} begins no chunk")
        self._kv = kv
        self._cached = cached
        self._left = list(reversed(pieces or whole_tensors(kv, self.start)))

    def take(self) -> MemoryRecord | PrefillReport:
        """`next`, without waiting."""
        if not self._left:
            tokens = self._kv.end - self.start
            if self._cached:
                return PrefillReport(cached_tokens=tokens)
            return PrefillReport(computed_tokens=tokens)
        piece = self._left.pop()
        raw = self._kv.in_place(piece)
        if raw is None:
            raise ValueError(f"{piece} is not one tensor of the memory")
        return MemoryRecord(piece, raw, self._cached)

    async def next(self) -> MemoryRecord | PrefillReport:
        return self.take()

    def prepare_for(self, codec: str) -> None:
        """Memory gives its bytes as they are."""

    def cancel(self) -> None:
        self._left.clear()


def whole_tensors(kv: StagingMap, start: int) -> list[Piece]:
    """Every tensor of tokens [start, kv.end) as one piece, in wire order."""
    groups = kv.layout.groups
    return [
        Piece(e.span.index, e.layer, e.group, e.span.start, e.span.end, 0, groups[e.group].kv_heads)
        for e in kv.layout.extents(start, kv.end, kv.chunk_tokens)
    ]
