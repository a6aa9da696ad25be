"""The exact prefix index: which blocks each engine holds, by its own cache events."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from prfaas.hashing import BlockHash
from prfaas.telemetry import KvDelta, WatchUpdate

logger = logging.getLogger(__name__)

MAX_BLOCKS = 1 << 22
"""Blocks remembered of one engine, about 0.5 GB here: a pool larger than that counts as unknown."""


@dataclass(slots=True)
class _Held:
    epoch: str
    blocks: set[BlockHash] = field(default_factory=set)
    overflowed: bool = False


class ExactPrefixIndex:
    """Holds one set of block hashes for each engine that publishes cache events; nothing to close.

    What an engine held is forgotten when its epoch changes, when it says so, and when a new stream
    starts.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._engines: dict[str, _Held] = {}
        self._max_blocks = max_blocks

    def update(self, engine: str, update: WatchUpdate) -> None:
        """Apply the cache changes of one Watch event; `engine` is our own name for it."""
        if update.full:
            self._engines.pop(engine, None)
        for delta in update.kv:
            self._apply(engine, delta)

    def drop(self, engine: str) -> None:
        """Forget an engine: nothing is known until its next full event."""
        self._engines.pop(engine, None)

    def known(self, engine: str, epoch: str) -> bool:
        """The engine publishes cache events, and they are of its present epoch."""
        held = self._engines.get(engine)
        return held is not None and held.epoch == epoch and not held.overflowed

    def blocks(self, engine: str) -> int:
        held = self._engines.get(engine)
        return len(held.blocks) if held is not None else 0

    def held(self, engine: str) -> tuple[str, tuple[BlockHash, ...]] | None:
        """Epoch and all blocks of an engine that publishes cache events, to be told to another
        index; None where nothing is known.
        """
        held = self._engines.get(engine)
        return None if held is None or held.overflowed else (held.epoch, tuple(held.blocks))

    def match(self, engine: str, chain: Sequence[BlockHash]) -> int:
        """How many leading blocks of `chain` the engine holds."""
        held = self._engines.get(engine)
        if held is None:
            return 0
        for count, block in enumerate(chain):
            if block not in held.blocks:
                return count
        return len(chain)

    def _apply(self, engine: str, delta: KvDelta) -> None:
        held = self._engines.get(engine)
        if held is None or delta.cleared or held.epoch != delta.epoch:
            held = self._engines[engine] = _Held(delta.epoch)
        held.blocks.difference_update(delta.removed)
        if held.overflowed:
            return
        held.blocks.update(delta.stored)
        if len(held.blocks) > self._max_blocks:
            held.overflowed = True
            held.blocks.clear()
            logger.warning(
                "%s holds more than %d blocks; its cache counts as unknown",
                engine,
                self._max_blocks,
            )
