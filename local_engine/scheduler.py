"""Who gets blocks, prefill and decode steps: first come, first served, nobody waits for ever.

Decides only; the engine carries out. Two rules keep it free of deadlock and starvation:

- Whoever holds blocks and needs more takes them from the newest holder, never from an older one, so
  the oldest always gets on.
- Whoever holds none waits until they are free, and while it does nobody newer gets any.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator

from local_engine.kv.blocks import BlockManager
from local_engine.kv.state_book import StateBook
from local_engine.kv.states import NO_SLOT
from local_engine.sequence import Phase, Sequence

# Phases in which blocks can be taken away; others are fenced or have nothing to give.
_PREEMPTIBLE = (Phase.WAITING, Phase.IMPORTING, Phase.DECODING)
_HOLDS_PREFIX = (Phase.REMOTE, Phase.STAGED)
_STATEFUL = (Phase.IMPORTING, Phase.DECODING, Phase.DRAINING)


class Scheduler:
    """Owns the queues and who holds which blocks; used by the engine thread only."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        chunk_tokens: int,
        max_batch: int,
        on_preempt: Callable[[Sequence, Phase], None],
        on_admit: Callable[[Sequence], None] = lambda _: None,
        states: StateBook | None = None,
    ) -> None:
        """`on_preempt` is told what was taken from whom; `on_admit` that a sequence has just got
        its blocks to prefill with, before anybody else gets any. `states`: of a model that has
        recurrent layers.
        """
        self.blocks = blocks
        self.preemptions = 0
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._on_preempt = on_preempt
        self._on_admit = on_admit
        self._states = states
        self.state_tokens = math.lcm(chunk_tokens, blocks.block_tokens)
        """States are kept for reuse after multiples of so many tokens."""
        # Each holds its sequences in order of arrival.
        self._queues: dict[Phase, list[Sequence]] = {p: [] for p in Phase if p is not Phase.DONE}
        self._starved: set[Sequence] = set()

    # --- looking ------------------------------------------------------------------------------

    def queue(self, phase: Phase) -> list[Sequence]:
        """Sequences in `phase`, oldest first; not to be changed."""
        return self._queues[phase]

    def live(self) -> Iterator[Sequence]:
        """Every sequence that is not done."""
        for queue in self._queues.values():
            yield from queue

    @property
    def idle(self) -> bool:
        return not any(self._queues.values())

    def check(self) -> None:
        """Raise AssertionError unless queues and block books agree."""
        for phase, queue in self._queues.items():
            for seq in queue:
                if seq.phase is not phase:
                    raise AssertionError(f"{seq!r} is queued as {phase.name}")
                if seq.computed > len(seq.table.blocks) * self.blocks.block_tokens:
                    raise AssertionError(f"{seq!r} has computed more than its blocks hold")
        self.blocks.check({seq.name: seq.table.blocks for seq in self.live()})
        if self._states is not None:
            with_all = (*_STATEFUL, Phase.WAITING)
            holders = [s for phase in with_all for s in self._queues[phase] if s.table.blocks]
            self._states.check({seq.name: seq.state for seq in holders})

    # --- entering and leaving -----------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        """A new sequence waits for its turn to prefill."""
        self._expect(seq)
        insort(self._queues[Phase.WAITING], seq, key=_order)
        seq.phase = Phase.WAITING

    def hold_prefix(self, seq: Sequence) -> None:
        """A new sequence takes what the prefix cache has of it, and waits for remote KV."""
        self._match(seq)
        insort(self._queues[Phase.REMOTE], seq, key=_order)
        seq.phase = Phase.REMOTE

    def match_again(self, seq: Sequence) -> None:
        """A REMOTE sequence takes what the prefix cache has of it now."""
        self._drop(seq)
        self._match(seq)

    def staged(self, seq: Sequence) -> None:
        """The KV a REMOTE sequence waits for has come as far as staging."""
        self._move(seq, Phase.STAGED)

    def fall_back(self, seq: Sequence) -> None:
        """A sequence that waited for remote KV prefills here after all, with what is cached."""
        self._drop(seq)
        self._expect(seq)
        self._move(seq, Phase.WAITING)

    def finish(self, seq: Sequence) -> None:
        """Free everything a live sequence has."""
        self._drop(seq)
        self._starved.discard(seq)
        self._queues[seq.phase].remove(seq)
        seq.phase = Phase.DONE

    # --- prefill ------------------------------------------------------------------------------

    def next_prefill(self) -> tuple[Sequence, int] | None:
        """The sequence to prefill now, which has its blocks, and the end of its next chunk.

        Chunks end at multiples of `chunk_tokens`, wherever they start. Sequences with nothing to
        compute pass on to their next phase on the way.
        """
        for seq in list(self._queues[Phase.WAITING]):
            if seq.paused or (not seq.table.blocks and not self._admit(seq)):
                continue
            if seq.computed < seq.target:
                grid = (seq.computed // self._chunk_tokens + 1) * self._chunk_tokens
                return seq, min(grid, seq.target)
            self._prefilled(seq)
        return None

    def computed(self, seq: Sequence, end: int) -> None:
        """KV of tokens [0, end) of `seq` is in the pool."""
        seq.computed = end
        if seq.shares and self._states is None:
            for index in range(seq.stored_blocks, end // self.blocks.block_tokens):
                self.blocks.store(seq.table.blocks[index], seq.block_name(index))
                seq.stored_blocks = index + 1
        elif seq.shares and end % self.state_tokens == 0:
            self._keep_state(seq, end)
        if seq.phase is Phase.WAITING and end >= seq.target:
            self._prefilled(seq)

    # --- import -------------------------------------------------------------------------------

    def next_import(self) -> Sequence | None:
        """The sequence to copy out of staging now, which has its blocks."""
        if self._queues[Phase.IMPORTING]:
            return self._queues[Phase.IMPORTING][0]
        for seq in self._queues[Phase.STAGED]:
            if self._slots_left() > 0 and self._claim_for_import(seq):
                self._move(seq, Phase.IMPORTING)
                return seq
            break
        return None

    def imported(self, seq: Sequence, end: int) -> None:
        """An IMPORTING sequence has KV of tokens [0, end): on to decoding, or to prefill on."""
        self._move(seq, Phase.WAITING)
        self.computed(seq, end)

    # --- decode -------------------------------------------------------------------------------

    def next_batch(self) -> list[Sequence]:
        """Sequences of the next decode step; each has a block for its newest token."""
        batch: list[Sequence] = []
        for seq in list(self._queues[Phase.DECODING]):
            if len(batch) == self._max_batch:
                break
            if seq.phase is Phase.DECODING and not seq.paused and self._grow(seq):
                batch.append(seq)
        return batch

    def decoded(self, seq: Sequence, token: int) -> None:
        """A decode step stored the newest token's KV and drew `token`."""
        seq.tokens.append(token)
        self.computed(seq, len(seq.tokens) - 1)

    # --- prefix cache -------------------------------------------------------------------------

    def clear_cache(self) -> None:
        """Forget all cached KV; what sequences hold now is not shared any more."""
        for seq in self.live():
            if seq.table.blocks:
                seq.shares = False
        self.blocks.clear_cache()

    # --- inside -------------------------------------------------------------------------------

    def _move(self, seq: Sequence, phase: Phase) -> None:
        self._queues[seq.phase].remove(seq)
        insort(self._queues[phase], seq, key=_order)
        seq.phase = phase

    def _prefilled(self, seq: Sequence) -> None:
        self._move(seq, Phase.DECODING if seq.decodes else Phase.DRAINING)

    def _drop(self, seq: Sequence) -> None:
        self._drop_state(seq)
        self.blocks.release(seq.drop_blocks())

    def _slots_left(self) -> int:
        """Places in the decode batch that nobody has or is about to have."""
        taken = sum(not seq.paused for seq in self._queues[Phase.DECODING])
        return self._max_batch - taken - len(self._queues[Phase.IMPORTING])

    def _admit(self, seq: Sequence) -> bool:
        if seq.decodes and self._slots_left() <= 0:
            return False
        # First: it may cost a state that the match would have found.
        if not self._take_state(seq):
            return False
        self._match(seq)
        if self._claim(seq):
            self._start_state(seq)
            self._on_admit(seq)
            return True
        self._drop(seq)
        return False

    def _expect(self, seq: Sequence) -> None:
        seq.expected_tokens = len(self._found(seq)) * self.blocks.block_tokens

    def _found(self, seq: Sequence) -> list[int]:
        """Blocks of the longest cached prefix that the sequence can go on from."""
        chain = seq.matchable
        found = self.blocks.match(chain)
        if self._states is None:
            return found
        return found[: self._states.match(chain, len(found), seq.checkpoints)]

    def _match(self, seq: Sequence) -> None:
        found = self._found(seq)
        self.blocks.acquire(found)
        seq.table.extend(found)
        seq.computed = len(found) * self.blocks.block_tokens
        seq.stored_blocks = len(found)
        if len(seq.tokens) == seq.prompt_tokens:
            seq.cached_tokens = seq.computed

    def _claim(self, seq: Sequence) -> bool:
        """All blocks for a sequence that waits without any of its own."""
        if any(other.order < seq.order for other in self._starved):
            return False
        # Those that decode will want a block each before long; taking it would only preempt.
        reserve = sum(not other.paused for other in self._queues[Phase.DECODING])
        while self.blocks.available < seq.blocks_needed + reserve:
            victim = self._idle_holder(seq)
            if victim is None:
                self._starved.add(seq)
                return False
            self._preempt(victim)
        self._starved.discard(seq)
        taken = self.blocks.allocate(seq.blocks_needed)
        assert taken is not None
        seq.table.extend(taken)
        return True

    def _claim_for_import(self, seq: Sequence) -> bool:
        """All blocks and a state slot; what is in the slot does not matter."""
        if not self._take_state(seq):
            return False
        if self._claim(seq):
            return True
        self._drop_state(seq)
        return False

    def _grow(self, seq: Sequence) -> bool:
        """A block for the newest token, taken from newer sequences if need be."""
        while seq.blocks_needed:
            taken = self.blocks.allocate(seq.blocks_needed, after=seq.table.blocks[-1])
            if taken is not None:
                seq.table.extend(taken)
                return True
            victim = self._newest_holder(seq)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _idle_holder(self, seq: Sequence) -> Sequence | None:
        """Someone who holds blocks and makes no progress, so that waiting for it would not help."""
        paused = [s for s in self.live() if s.paused and s.table.blocks and s is not seq]
        if paused:
            return max(paused, key=_order)
        active = (Phase.IMPORTING, Phase.DECODING, Phase.DRAINING)
        if any(self._queues[phase] for phase in active) or any(
            other.table.blocks for other in self._queues[Phase.WAITING] if other is not seq
        ):
            return None
        return self._newest(_HOLDS_PREFIX, seq)

    def _newest_holder(self, seq: Sequence) -> Sequence | None:
        paused = [s for s in self.live() if s.paused and s.table.blocks and s is not seq]
        if paused:
            return max(paused, key=_order)
        return self._newest(_PREEMPTIBLE, seq) or self._newest(_HOLDS_PREFIX, seq)

    def _newest(self, phases: tuple[Phase, ...], seq: Sequence) -> Sequence | None:
        """The newest sequence in `phases` that arrived after `seq`, holds blocks, and decodes."""
        holders = [
            other
            for phase in phases
            for other in self._queues[phase]
            if other.order > seq.order and other.table.blocks and other.decodes
        ]
        return max(holders, key=_order, default=None)

    # --- states -------------------------------------------------------------------------------

    def _take_state(self, seq: Sequence) -> bool:
        """A state slot for a sequence that waits without one, as `_claim` takes blocks."""
        if self._states is None:
            return True
        if any(other.order < seq.order for other in self._starved):
            return False
        while not self._states.available:
            victim = self._idle_holder(seq)
            if victim is None:
                self._starved.add(seq)
                return False
            self._preempt(victim)
        seq.state = self._states.take()
        return True

    def _start_state(self, seq: Sequence) -> None:
        """Its slot gets the state after the prefix that it has matched."""
        if self._states is not None:
            count = seq.computed // self.blocks.block_tokens
            self._states.start(seq.state, seq.block_name(count - 1) if count else None)

    def _keep_state(self, seq: Sequence, end: int) -> None:
        """Keep the state after [0, end), which makes its blocks of use to others."""
        assert self._states is not None
        count = end // self.blocks.block_tokens
        names = [seq.block_name(index) for index in range(count)]
        if self._states.keep(seq.state, names):
            # All of them: some may have lost their names since.
            for index, name in enumerate(names):
                self.blocks.store(seq.table.blocks[index], name)
            seq.stored_blocks = count

    def _drop_state(self, seq: Sequence) -> None:
        if self._states is not None and seq.state != NO_SLOT:
            self._states.give_back(seq.state)
            seq.state = NO_SLOT

    # --- preemption ---------------------------------------------------------------------------

    def _preempt(self, seq: Sequence) -> None:
        before = seq.phase
        self.preemptions += 1
        self._drop(seq)
        self._expect(seq)
        self._move(seq, Phase.WAITING)
        self._on_preempt(seq, before)


def _order(seq: Sequence) -> int:
    return seq.order
