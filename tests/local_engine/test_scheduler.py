"""Decisions of the scheduler alone: who is next, who gives way, and who never does."""

from __future__ import annotations

import pytest

from local_engine.kv.blocks import BlockManager
from local_engine.kv.events import CacheEventLog
from local_engine.kv.pool import KvPool
from local_engine.scheduler import Scheduler
from local_engine.sequence import Phase, Sequence
from local_engine.testing import CHAIN_LAYOUT

BLOCK = 4


class Session(Sequence):
    decodes = False


class Bench:
    """A scheduler and a prefill that computes nothing."""

    def __init__(self, blocks: int, *, max_batch: int = 8) -> None:
        self.pool = KvPool(CHAIN_LAYOUT, blocks, BLOCK)
        self.preempted: list[tuple[str, Phase]] = []
        self.scheduler = Scheduler(
            BlockManager(blocks, BLOCK, CacheEventLog("e")),
            chunk_tokens=2 * BLOCK,
            max_batch=max_batch,
            on_preempt=lambda seq, before: self.preempted.append((seq.name, before)),
        )
        self.order = 0

    def make(self, name: str, length: int, *, session: bool = False) -> Sequence:
        self.order += 1
        tokens = [self.order * 100 + i for i in range(length)]
        kind = Session if session else Sequence
        return kind(name, self.order, tokens, "", self.pool, shares=True)

    def add(self, name: str, length: int, *, session: bool = False) -> Sequence:
        seq = self.make(name, length, session=session)
        self.scheduler.enqueue(seq)
        return seq

    def prefill(self) -> str | None:
        """One chunk; the name of its sequence."""
        found = self.scheduler.next_prefill()
        self.scheduler.check()
        if found is None:
            return None
        seq, end = found
        self.scheduler.computed(seq, end)
        return seq.name

    def prefill_all(self) -> None:
        while self.prefill() is not None:
            pass

    def decode(self) -> list[str]:
        batch = self.scheduler.next_batch()
        self.scheduler.check()
        for seq in batch:
            self.scheduler.decoded(seq, 7)
        return [seq.name for seq in batch]


def test_a_chunk_ends_at_the_grid_or_at_the_last_token_but_one() -> None:
    bench = Bench(16)
    seq = bench.add("a", 20)
    ends = []
    while (found := bench.scheduler.next_prefill()) is not None:
        ends.append(found[1])
        bench.scheduler.computed(*found)
    assert ends == [8, 16, 19]
    assert seq.phase is Phase.DECODING


def test_a_session_goes_on_to_drain_after_all_its_tokens() -> None:
    bench = Bench(16)
    seq = bench.add("s", 20, session=True)
    bench.prefill_all()
    assert seq.computed == 20
    assert seq.phase is Phase.DRAINING
    assert bench.decode() == []


def test_a_prompt_gets_all_its_blocks_at_once_and_in_a_row() -> None:
    bench = Bench(16)
    seq = bench.add("a", 30)
    bench.prefill()
    assert seq.table.blocks == list(range(8))


def test_who_starts_leaves_a_block_for_each_that_decodes() -> None:
    bench = Bench(6)
    bench.add("a", 8)
    bench.prefill_all()
    bench.decode()
    bench.add("b", 16)
    assert bench.prefill() is None, "four blocks are free, but a will want one of them"
    bench.scheduler.finish(bench.scheduler.queue(Phase.DECODING)[0])
    assert bench.prefill() == "b"


def test_the_newest_gives_way_and_waits_in_its_old_place() -> None:
    bench = Bench(6)
    for name in ("a", "b"):
        bench.add(name, 8)
    bench.prefill_all()
    bench.add("c", 4)
    for _ in range(9):
        bench.decode()
    assert bench.preempted == [("b", Phase.DECODING)]
    assert [seq.name for seq in bench.scheduler.queue(Phase.WAITING)] == ["b", "c"]


def test_nobody_gives_way_to_a_newer_one() -> None:
    bench = Bench(5)
    bench.add("a", 8)
    bench.add("b", 8)
    bench.prefill_all()
    a, b = bench.scheduler.queue(Phase.DECODING)
    assert bench.decode() == ["a", "b"]
    assert bench.decode() == ["a"], "one block is left, and b waits for its own"
    assert bench.preempted == []
    a.paused = True
    assert bench.decode() == ["b"]
    assert bench.preempted == [("a", Phase.DECODING)], "it makes no progress anyway"
    assert b.phase is Phase.DECODING


def test_sessions_are_never_preempted() -> None:
    bench = Bench(7)
    bench.add("a", 8)
    bench.add("s", 16, session=True)
    bench.prefill_all()
    assert [bench.decode() for _ in range(7)] == [["a"]] * 5 + [[]] * 2
    assert bench.preempted == []
    bench.scheduler.finish(bench.scheduler.queue(Phase.DRAINING)[0])
    assert bench.decode() == ["a"]


def test_prefixes_of_waiting_requests_are_the_last_to_go() -> None:
    bench = Bench(7)
    seed = bench.add("seed", 9)
    bench.prefill_all()
    tokens = list(seed.tokens)
    bench.scheduler.finish(seed)
    bench.add("old", 8)
    bench.prefill_all()
    remote = bench.make("remote", 1)
    remote = Sequence("remote", bench.order, [*tokens, 5], "", bench.pool, shares=True)
    bench.scheduler.hold_prefix(remote)
    assert remote.computed == 8
    bench.order += 1
    bench.add("young", 8)
    bench.prefill_all()
    for _ in range(16):
        bench.decode()
    assert bench.preempted == [("young", Phase.DECODING), ("remote", Phase.REMOTE)]


def test_a_preempted_sequence_whose_client_does_not_read_is_not_prefilled_again() -> None:
    bench = Bench(5)
    bench.add("a", 8)
    bench.add("b", 8)
    bench.prefill_all()
    _, b = bench.scheduler.queue(Phase.DECODING)
    b.paused = True
    for _ in range(7):
        bench.decode()
    assert bench.preempted == [("b", Phase.DECODING)]
    bench.scheduler.finish(bench.scheduler.queue(Phase.DECODING)[0])
    assert bench.prefill() is None
    b.paused = False
    assert bench.prefill() == "b"


def test_a_starved_prompt_keeps_newer_ones_out() -> None:
    bench = Bench(8)
    bench.add("a", 12)
    bench.prefill_all()
    bench.add("big", 24)
    bench.add("small", 4)
    assert bench.prefill() is None
    bench.scheduler.finish(bench.scheduler.queue(Phase.DECODING)[0])
    assert bench.prefill() == "big"


def test_who_has_blocks_prefills_while_an_older_one_still_waits_for_some() -> None:
    bench = Bench(8)
    bench.add("a", 8)
    bench.prefill_all()
    big = bench.add("big", 28)
    partial = bench.make("partial", 12)
    bench.scheduler.hold_prefix(partial)
    bench.scheduler.staged(partial)
    assert bench.scheduler.next_import() is partial
    bench.scheduler.imported(partial, 4)
    assert big.order < partial.order
    assert bench.prefill() == "partial"


@pytest.mark.parametrize("max_batch", [1, 3])
def test_the_batch_is_bounded_and_goes_by_age(max_batch: int) -> None:
    bench = Bench(32, max_batch=max_batch)
    for i in range(5):
        bench.add(f"s{i}", 6)
    bench.prefill_all()
    assert bench.decode() == [f"s{i}" for i in range(max_batch)]


def test_the_check_finds_a_sequence_in_the_wrong_queue() -> None:
    bench = Bench(8)
    seq = bench.add("a", 6)
    seq.phase = Phase.DECODING
    with pytest.raises(AssertionError, match="is queued as WAITING"):
        bench.scheduler.check()
