"""Memory as a source and as a sink of KV."""

from __future__ import annotations

import random

import numpy as np
import pytest

from prfaas.interfaces import KvSink, KvSource
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.ledger import Piece
from prfaas.memory_kv import MemorySource, whole_tensors
from prfaas.placement import StagingMap
from prfaas.session_messages import PrefillReport
from prfaas.testing.kv_contracts import KvSinkContract, KvSourceContract, canonical

LAYOUT = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0, 2), 4, 4, "bfloat16"),
        LayerGroup(GroupKind.FULL, (1,), 1, 8, "float32"),
    )
)


def memory(start: int = 0, end: int = 21, grid: int = 8) -> StagingMap:
    nbytes = LAYOUT.session_bytes(start, end)
    values = np.random.default_rng(start).integers(0, 256, nbytes, dtype=np.uint8)
    return StagingMap(LAYOUT, start, end, grid, values)


class TestMemorySource(KvSourceContract):
    async def make(self) -> tuple[KvSource, StagingMap]:
        kv = memory(3)
        return MemorySource(kv), kv


class TestShuffledMemorySource(KvSourceContract):
    async def make(self) -> tuple[KvSource, StagingMap]:
        kv = memory()
        pieces = whole_tensors(kv, 0)
        random.Random(1).shuffle(pieces)
        return MemorySource(kv, pieces=pieces, cached=False), kv


class TestMemorySink(KvSinkContract):
    def kv(self) -> StagingMap:
        return memory(3)

    def make(self, kv: StagingMap) -> KvSink:
        nbytes = LAYOUT.session_bytes(kv.start, kv.end)
        return StagingMap(LAYOUT, kv.start, kv.end, 8, np.zeros(nbytes, dtype=np.uint8))

    def read(self, sink: KvSink, piece: Piece) -> np.ndarray:
        assert isinstance(sink, StagingMap)
        return canonical(sink, piece)


class TestMemorySinkOnAnotherGrid(TestMemorySink):
    def make(self, kv: StagingMap) -> KvSink:
        nbytes = LAYOUT.session_bytes(kv.start, kv.end)
        return StagingMap(LAYOUT, kv.start, kv.end, 5, np.zeros(nbytes, dtype=np.uint8))


def test_a_session_may_begin_with_any_chunk() -> None:
    kv = memory()
    source = MemorySource(kv, 16)
    chunks = []
    while not isinstance(event := source.take(), PrefillReport):
        chunks.append(event.piece.chunk)
        assert event.raw.base is not None  # a view, not a copy
    assert chunks == [2, 2, 2]
    assert event == PrefillReport(cached_tokens=5)
    with pytest.raises(ValueError, match="token 9 begins no chunk"):
        MemorySource(kv, 9)
