"""The approximate prefix index: what each engine was sent of late, for what it does not tell."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from prfaas.clock import Clock
from prfaas.hashing import BlockHash

MAX_BLOCKS = 1 << 16
"""Remembered of one engine, about 10 MB; the oldest are forgotten."""
TTL_S = 600.0
"""A prefix that was not sent for so long may be gone."""


class RecentPrefixes:
    """Remembers the blocks of prompts by the engine they were sent to; nothing to close.

    So requests of one burst that share a prefix meet at one engine before any of them is computed,
    and so do those for engines that publish no cache events.
    """

    def __init__(self, clock: Clock, max_blocks: int = MAX_BLOCKS, ttl_s: float = TTL_S) -> None:
        self._clock = clock
        self._max_blocks = max_blocks
        self._ttl_s = ttl_s
        self._engines: dict[str, OrderedDict[BlockHash, float]] = {}

    def sent(self, engine: str, chain: Sequence[BlockHash]) -> None:
        """A prompt with these blocks goes to `engine`."""
        blocks = self._engines.setdefault(engine, OrderedDict())
        until = self._clock.now() + self._ttl_s
        for block in reversed(chain):  # the first blocks are the youngest: they are shared most
            blocks[block] = until
            blocks.move_to_end(block)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def forget(self, engine: str) -> None:
        """Its cache is gone."""
        self._engines.pop(engine, None)

    def blocks(self, engine: str) -> int:
        return len(self._engines.get(engine, ()))

    def match(self, engine: str, chain: Sequence[BlockHash]) -> int:
        """How many leading blocks of `chain` were sent to `engine` of late."""
        blocks = self._engines.get(engine)
        if not blocks:
            return 0
        now = self._clock.now()
        for count, block in enumerate(chain):
            until = blocks.get(block)
            if until is None or until < now:
                return count
        return len(chain)
