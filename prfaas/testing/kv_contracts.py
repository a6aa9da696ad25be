"""Contract suites of what KV comes from, goes to and travels by."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from prfaas.interfaces import KvRecord, KvSink, KvSource
from prfaas.ledger import Ledger, Piece, piece_digest
from prfaas.placement import StagingMap
from prfaas.session_messages import PrefillReport
from prfaas.testing.kv_pieces import split_pieces

Question = tuple[range | None, range | None]
"""Chunks and layers asked for at once; None: all."""


async def records_of(source: KvSource) -> tuple[list[KvRecord], PrefillReport]:
    """Everything a source gives, none of it given back yet."""
    records: list[KvRecord] = []
    while not isinstance(event := await source.next(), PrefillReport):
        records.append(event)
    return records, event


class KvSourceContract:
    """What holds for every source of KV. Subclass it and override `make`, whose source holds no
    record back for so little KV.
    """

    async def make(self) -> tuple[KvSource, StagingMap]:
        """A source, and the same KV in memory."""
        raise NotImplementedError

    def assert_free(self) -> None:
        """Nothing is kept for the source any more."""

    async def test_every_byte_comes_once_and_then_the_report(self) -> None:
        source, kv = await self.make()
        records, report = await records_of(source)
        ledger = Ledger(kv.layout, kv.start, kv.end, kv.chunk_tokens)
        staged = np.zeros(kv.layout.session_bytes(kv.start, kv.end), dtype=np.uint8)
        there = StagingMap(kv.layout, kv.start, kv.end, kv.chunk_tokens, staged)
        for record in records:
            assert ledger.piece_bytes(record.piece) == record.raw.nbytes
            assert ledger.claim(record.piece)
            ledger.commit(record.piece, piece_digest(record.raw), record.raw.nbytes)
            there.scatter(record.piece, record.raw)
            record.done()
        assert ledger.whole
        for extent in kv.layout.extents(kv.start, kv.end, kv.chunk_tokens):
            assert there.tensor(extent).tobytes() == kv.tensor(extent).tobytes()
        assert report.cached_tokens + report.computed_tokens >= kv.end - kv.start
        assert {record.cached for record in records} <= {True, False}
        source.cancel()
        self.assert_free()

    async def test_records_are_given_back_in_any_order_and_more_than_once(self) -> None:
        source, _ = await self.make()
        records, _ = await records_of(source)
        assert len(records) > 1
        for record in reversed(records):
            record.done()
            record.done()
        source.cancel()
        self.assert_free()

    async def test_a_record_keeps_its_bytes_until_it_is_given_back(self) -> None:
        source, _ = await self.make()
        first = await source.next()
        assert not isinstance(first, PrefillReport)
        before = first.raw.tobytes()
        rest, _ = await records_of(source)
        for record in rest:
            record.done()
        assert first.raw.tobytes() == before
        first.done()
        self.assert_free()

    async def test_cancel_may_come_at_any_time_and_again(self) -> None:
        source, _ = await self.make()
        source.cancel()
        source.cancel()
        source, _ = await self.make()
        first = await source.next()
        assert not isinstance(first, PrefillReport)
        source.cancel()
        source.cancel()
        first.done()


class KvSinkContract:
    """What holds for every sink of KV. Subclass it and override `make`."""

    chunk_tokens = 8
    """Of the sender: the sink may have a grid of its own."""

    def make(self, kv: StagingMap) -> KvSink:
        """An empty sink for tokens [kv.start, kv.end)."""
        raise NotImplementedError

    def read(self, sink: KvSink, piece: Piece) -> npt.NDArray[np.uint8]:
        """Canonical bytes of what the sink has now."""
        raise NotImplementedError

    def kv(self) -> StagingMap:
        raise NotImplementedError

    @pytest.mark.parametrize("seed", range(5))
    def test_pieces_in_any_cut_and_order_are_all_there(self, seed: int) -> None:
        rng, kv = random.Random(seed), self.kv()
        sink = self.make(kv)
        pieces = split_pieces(kv.layout, kv.start, kv.end, self.chunk_tokens, rng)
        rng.shuffle(pieces)
        for piece in pieces:
            raw = canonical(kv, piece)
            place = sink.in_place(piece)
            if place is None:
                sink.scatter(piece, raw)
            else:
                assert (place.nbytes, place.flags.c_contiguous) == (raw.nbytes, True)
                place[:] = raw
        for piece in pieces:
            assert self.read(sink, piece).tobytes() == canonical(kv, piece).tobytes()


@dataclass(frozen=True, slots=True)
class Carried:
    """One transfer, as both ends saw it."""

    staged: bytes
    expected: bytes
    sender: tuple[int, int, bytes]
    """Frames, raw bytes and root digest of the ledger."""
    receiver: tuple[int, int, bytes]
    came: tuple[tuple[int, int], ...]
    """(chunk, layer), in the order in which it was verified."""


def summary(ledger: Ledger) -> tuple[int, int, bytes]:
    return ledger.frames, ledger.raw_bytes, ledger.root_digest()


class KvStreamContract:
    """What holds for every way between two session machines. Subclass it and override `carry`."""

    tensors = frozenset((chunk, layer) for chunk in range(3) for layer in range(3))
    """(chunk, layer) of all there is, of three chunks and at least three layers."""

    async def carry(self, questions: list[Question] | None) -> Carried:
        """The same KV each time; `questions` None: push; else asked one after another, each when
        the one before is answered.
        """
        raise NotImplementedError

    async def test_push_and_pull_end_in_identical_bytes_and_ledgers(self) -> None:
        push = await self.carry(None)
        pull = await self.carry([(None, range(2, 3)), (range(1, 2), None), (None, None)])
        for carried in (push, pull):
            assert carried.staged == carried.expected
            assert carried.sender == carried.receiver
        assert push.staged == pull.staged
        assert push.sender == pull.sender

    async def test_pull_brings_what_is_asked_for_when_it_is(self) -> None:
        carried = await self.carry([(range(2, 3), range(1)), (None, range(1, 3)), (None, None)])
        second = {(chunk, layer) for chunk in range(3) for layer in (1, 2)}
        rounds = [{(2, 0)}, second, self.tensors - second - {(2, 0)}]
        came = list(dict.fromkeys(carried.came))
        for expected in rounds:
            assert set(came[: len(expected)]) == expected
            del came[: len(expected)]
        assert came == []


def canonical(kv: StagingMap, piece: Piece) -> npt.NDArray[np.uint8]:
    """The bytes of any piece of the map's tokens, copied out row by row."""
    rows = []
    for extent in kv.layout.extents(kv.start, kv.end, kv.chunk_tokens):
        span = extent.span
        low, high = max(span.start, piece.token_start), min(span.end, piece.token_end)
        if (extent.group, extent.layer) == (piece.group, piece.layer) and low < high:
            heads = slice(piece.head_start, piece.head_end)
            rows.append(kv.tensor(extent)[:, low - span.start : high - span.start, heads])
    return np.ascontiguousarray(np.concatenate(rows, axis=1)).reshape(-1)
