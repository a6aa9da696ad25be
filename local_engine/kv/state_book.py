"""Which state slots are free, a sequence's own, or keep the state of a cached prefix.

| slot | belongs to                      | may be taken away                   |
|------|---------------------------------|-------------------------------------|
| free | nobody                          | -                                   |
| live | the sequence that writes to it  | no                                  |
| kept | the prefix that a block ends    | yes, the longest unused first       |

A prefix can be gone on with only where its state is kept. So blocks have names only as long as a
kept state needs them: what the index of an engine shows is what it can use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from local_engine.kv.blocks import BlockManager, CacheListener
from local_engine.kv.states import NO_SLOT, StatePool
from prfaas.hashing import BlockHash


class StateBook:
    """Owns the bookkeeping of a pool's slots; used by the engine thread only.

    It is the listener of the engine's `BlockManager`, to be told with `attach`, and passes what it
    hears on to `listener`.
    """

    def __init__(self, pool: StatePool, listener: CacheListener) -> None:
        self._pool = pool
        self._listener = listener
        self._blocks: BlockManager | None = None
        self._free = list(range(pool.slots, NO_SLOT, -1))
        # By the name of the last block of the prefix, longest unused first.
        self._kept: OrderedDict[BlockHash, int] = OrderedDict()
        self._prefix: dict[BlockHash, tuple[BlockHash, ...]] = {}
        # Name of a block -> last blocks of the kept prefixes that it is part of.
        self._needed_by: dict[BlockHash, set[BlockHash]] = {}

    def attach(self, blocks: BlockManager) -> None:
        """The manager of the same engine, before anything else."""
        self._blocks = blocks

    @property
    def total(self) -> int:
        return self._pool.slots

    @property
    def available(self) -> int:
        """Slots that `take` can give: free ones and those of kept states."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """States kept for reuse."""
        return len(self._kept)

    def take(self) -> int:
        """A slot for a sequence, with anything in it. `available` must say that there is one."""
        if not self._free:
            self._drop(next(iter(self._kept)))
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """A sequence's slot is free."""
        self._free.append(slot)

    def start(self, slot: int, prefix: BlockHash | None) -> None:
        """Fill a sequence's slot with the state after a kept prefix, or after no tokens."""
        if prefix is None:
            self._pool.clear(slot)
        else:
            self._pool.copy(self.slot_of(prefix), slot)

    def slot_of(self, prefix: BlockHash) -> int:
        """Where the state after a prefix is kept. It counts as used now."""
        self._kept.move_to_end(prefix)
        return self._kept[prefix]

    def keep(self, slot: int, prefix: Sequence[BlockHash]) -> bool:
        """Keep a copy of a sequence's state, after the blocks `prefix`. False: there is no room."""
        last = prefix[-1]
        if last in self._kept:
            self._kept.move_to_end(last)
            return True
        if not self.available:
            return False
        # Before another state may go: what both need stays.
        self._prefix[last] = tuple(prefix)
        for name in prefix:
            self._needed_by.setdefault(name, set()).add(last)
        copy = self.take()
        self._pool.copy(slot, copy)
        self._kept[last] = copy
        return True

    def match(self, chain: Sequence[BlockHash], blocks: int, needed: Sequence[int] = ()) -> int:
        """The most of the first `blocks` of `chain` after which a state is kept, 0 for none.

        `needed`: tokens, ascending, after which states have to be kept too as far as they are not
        beyond the result.
        """
        assert self._blocks is not None
        size = self._blocks.block_tokens
        for token in needed:
            if token > blocks * size:
                break
            count, rest = divmod(token, size)
            if rest or chain[count - 1] not in self._kept:
                blocks = (token - 1) // size
                break
        while blocks and chain[blocks - 1] not in self._kept:
            blocks -= 1
        return blocks

    # --- what blocks say ------------------------------------------------------------------------

    def stored(self, name: BlockHash) -> None:
        self._listener.stored(name)

    def removed(self, name: BlockHash) -> None:
        """States after prefixes with this block are of no use any more."""
        self._listener.removed(name)
        for last in list(self._needed_by.get(name, ())):
            self._drop(last)

    def cleared(self) -> None:
        self._free.extend(self._kept.values())
        self._kept.clear()
        self._prefix.clear()
        self._needed_by.clear()
        self._listener.cleared()

    # --- books ----------------------------------------------------------------------------------

    def check(self, live: Mapping[str, int]) -> None:
        """Raise AssertionError unless every slot has one place and names agree with the blocks."""
        slots = sorted([*self._free, *self._kept.values(), *live.values()])
        if slots != list(range(1, self.total + 1)):
            raise AssertionError(
                f"state slots: {len(self._free)} free, {len(self._kept)} kept, live {dict(live)} "
                f"are not each of {self.total} once"
            )
        if self._kept.keys() != self._prefix.keys():
            raise AssertionError("kept states and their prefixes disagree")
        needed: dict[BlockHash, set[BlockHash]] = {}
        for last, prefix in self._prefix.items():
            for name in prefix:
                needed.setdefault(name, set()).add(last)
        if needed != self._needed_by:
            raise AssertionError("a block name is needed by other states than the books say")
        assert self._blocks is not None
        named = set(self._blocks.names())
        if named != needed.keys():
            raise AssertionError(
                f"{len(named - needed.keys())} named blocks without a state, "
                f"{len(needed.keys() - named)} states without a block"
            )

    def _drop(self, last: BlockHash) -> None:
        """Forget a kept state, and the names that only it needed."""
        assert self._blocks is not None
        self._free.append(self._kept.pop(last))
        for name in self._prefix.pop(last):
            needed = self._needed_by[name]
            needed.discard(last)
            if not needed:
                del self._needed_by[name]
                self._blocks.forget(name)
