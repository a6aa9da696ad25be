"""The feed of prefix-cache changes: net changes since the last message, or everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prfaas.hashing import BlockHash
from prfaas_connect.port.messages import KvEvents

# Hashes of one message; keeps it far below the port's header limit.
MAX_HASHES = 16384


class CacheEventLog:
    """Collects cache changes for KvPort; a `CacheListener`. Numbers its messages without gaps.

    Within one message a hash is either stored or removed, whichever came last.
    """

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._seq = 0
        # True: stored, False: removed; the order is that of the last change.
        self._changes: dict[BlockHash, bool] = {}
        self._cleared = False

    def stored(self, name: BlockHash) -> None:
        self._changes[name] = True

    def removed(self, name: BlockHash) -> None:
        self._changes[name] = False

    def cleared(self) -> None:
        self._changes.clear()
        self._cleared = True

    @property
    def pending(self) -> bool:
        return self._cleared or bool(self._changes)

    def discard(self) -> None:
        """Forget what nobody listens to; a snapshot must come before the next `take`."""
        self._changes.clear()
        self._cleared = False

    def take(self) -> Iterator[KvEvents]:
        """Messages with all changes since the last call."""
        changes, cleared = self._changes, self._cleared
        self._changes, self._cleared = {}, False
        if cleared or changes:
            stored = [name for name, present in changes.items() if present]
            removed = [name for name, present in changes.items() if not present]
            yield from self._messages(stored, removed, cleared)

    def snapshot(self, names: Iterable[BlockHash]) -> Iterator[KvEvents]:
        """Messages that replace whatever the other side knows by `names`."""
        self._changes, self._cleared = {}, False
        yield from self._messages(list(names), [], True)

    def _messages(
        self, stored: Sequence[BlockHash], removed: Sequence[BlockHash], cleared: bool
    ) -> Iterator[KvEvents]:
        for start in range(0, max(len(stored), len(removed), 1), MAX_HASHES):
            part = slice(start, start + MAX_HASHES)
            self._seq += 1
            yield KvEvents(
                epoch=self._epoch,
                seq=self._seq,
                stored=[name.hex() for name in stored[part]],
                removed=[name.hex() for name in removed[part]],
                cleared=cleared and start == 0,
            )
