"""A sequence of tokens on its way through the engine: what it holds and how far it is."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq

from local_engine.kv.pool import KvPool
from local_engine.kv.states import NO_SLOT
from prfaas.hashing import BlockHash, block_chain, block_hash, root_hash


class Phase(enum.Enum):
    """Where a sequence is. Blocks it may hold: none (-), matched prefix (m), all (a); with all of
    them it has a state slot, where the model has recurrent layers.

    | phase     | blocks | waits for                                             |
    |-----------|--------|-------------------------------------------------------|
    | WAITING   | - or a | its turn to prefill; `a` once it has had blocks       |
    | REMOTE    | m      | FetchDone from the agent                              |
    | STAGED    | m      | blocks to import into                                 |
    | IMPORTING | a      | the next bounded copy out of staging                  |
    | DECODING  | a      | the next decode step                                  |
    | DRAINING  | a      | its last records to leave for the ring (exports only) |
    | DONE      | -      | nothing                                               |
    """

    WAITING = "waiting"
    REMOTE = "remote"
    STAGED = "staged"
    IMPORTING = "importing"
    DECODING = "decoding"
    DRAINING = "draining"
    DONE = "done"


class Sequence:
    """Tokens, their blocks and their progress. Changed only by the scheduler and the engine thread.

    `computed` tokens have their KV in the pool, `expected_tokens` were in the prefix cache when it
    began to wait. `shares`: may read and fill the prefix cache.
    `paused`: its client reads too slowly; it is passed over until that ends.
    """

    # A sequence that decodes keeps its last token back: it is the next decode step's input.
    decodes = True
    # Tokens after which it has to have the states one by one, not only at the end of a prefix.
    checkpoints: Seq[int] = ()

    def __init__(
        self, name: str, order: int, tokens: Seq[int], salt: str, pool: KvPool, *, shares: bool
    ) -> None:
        self.name = name
        self.order = order
        self.tokens = list(tokens)
        self.prompt_tokens = len(self.tokens)
        self.shares = shares
        self.phase = Phase.WAITING
        self.paused = False
        self.computed = 0
        self.cached_tokens = 0
        self.expected_tokens = 0
        self.table = pool.new_table()
        self.state = NO_SLOT
        self.stored_blocks = 0
        self._pool = pool
        self._salt = salt
        self._chain = block_chain(self.tokens, pool.block_tokens, salt) if shares else []

    def __repr__(self) -> str:
        paused = " paused" if self.paused else ""
        return (
            f"<{type(self).__name__} {self.name} {self.phase.name}{paused} "
            f"{self.computed}/{self.target} blocks={len(self.table.blocks)}>"
        )

    @property
    def target(self) -> int:
        """Tokens whose KV prefill must provide."""
        return len(self.tokens) - 1 if self.decodes else len(self.tokens)

    @property
    def matchable(self) -> list[BlockHash]:
        """Names of the blocks that a prefix match may provide."""
        return self._chain[: self.target // self._pool.block_tokens] if self.shares else []

    @property
    def left_to_compute(self) -> int:
        """Prompt tokens still to be computed, as far as one can tell before it has its blocks."""
        return self.target - max(self.computed, self.expected_tokens)

    @property
    def blocks_needed(self) -> int:
        """Blocks for all its present tokens that it does not hold yet."""
        size = self._pool.block_tokens
        return max(0, -(-len(self.tokens) // size) - len(self.table.blocks))

    def block_name(self, index: int) -> BlockHash:
        """Name of its block `index`, all of whose tokens must be known."""
        size = self._pool.block_tokens
        while len(self._chain) <= index:
            at = len(self._chain)
            parent = self._chain[-1] if self._chain else root_hash(self._salt)
            self._chain.append(block_hash(parent, self.tokens[at * size : (at + 1) * size]))
        return self._chain[index]

    def drop_blocks(self) -> list[int]:
        """Forget all KV; the caller gives the returned blocks back."""
        blocks = self.table.blocks
        self.table = self._pool.new_table()
        self.computed = 0
        self.stored_blocks = 0
        return blocks
