"""The approximate prefix index: what each engine was sent of late, for what it does not tell."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from prfaas.clock import Clock

T = TypeVar("T", bound=Hashable)

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
        self._engines: dict[str, OrderedDict[Any, float]] = {}

    def sent(self, engine: str, chain: Sequence[T], age_s: float = 0.0) -> list[T]:
        """A prompt with these blocks went to `engine`, so long ago; those that had not just before,
        the last first.
        """
        blocks = self._engines.setdefault(engine, OrderedDict())
        until = self._clock.now() + self._ttl_s - age_s
        young = until - self._ttl_s / 10  # what was sent just before is not made younger again
        known = blocks.get
        start = _leading(blocks, chain, young)
        # The first blocks are the youngest: they are shared most.
        made = [block for block in reversed(chain[start:]) if known(block, 0.0) < young]
        for block in made:
            blocks[block] = until
            blocks.move_to_end(block)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)
        return made

    def forget(self, engine: str) -> None:
        """Its cache is gone."""
        self._engines.pop(engine, None)

    def clear(self) -> None:
        self._engines.clear()

    def newest(self, limit: int) -> list[tuple[str, list[Any]]]:
        """By engine what was sent there, the youngest last; `limit` of all together."""
        share = limit // max(1, len(self._engines))
        return [
            (engine, list(islice(reversed(blocks), share))[::-1])
            for engine, blocks in self._engines.items()
        ]

    def blocks(self, engine: str) -> int:
        return len(self._engines.get(engine, ()))

    def match(self, engine: str, chain: Sequence[Hashable]) -> int:
        """How many leading blocks of `chain` were sent to `engine` of late.

        A block stands for all before it, so where one is known those are too, or were until just
        now.
        """
        blocks = self._engines.get(engine)
        return _leading(blocks, chain, self._clock.now()) if blocks else 0

    def age_s(self, engine: str, block: Hashable) -> float:
        """Since it was sent there, to a tenth of the time for which it is remembered; infinite:
        never, or it is forgotten.
        """
        blocks = self._engines.get(engine)
        until = None if blocks is None else blocks.get(block)
        return float("inf") if until is None else self._ttl_s - (until - self._clock.now())


def _leading(blocks: Mapping[Any, float], chain: Sequence[Hashable], at: float) -> int:
    """How many of them are remembered until then at least, looked for by halves from the first."""
    if not chain or blocks.get(chain[0], -1.0) < at:
        return 0
    known, end = 1, len(chain)
    while known < end:
        middle = (known + end) // 2
        if blocks.get(chain[middle], -1.0) >= at:
            known = middle + 1
        else:
            end = middle
    return known
