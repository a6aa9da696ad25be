"""The feed that gateways watch: state and events of one agent, merged for each watcher.

A watcher first gets everything, then what changed: outcomes and started transfers at once, the
rest within the interval. What a slow watcher has not taken is merged, and where that grows over
its bound it gets everything anew, so no watcher costs more than the state itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from itertools import islice

from prfaas.hashing import BlockHash
from prfaas.limits import Limits
from prfaas.snapshot import Outcome
from prfaas.telemetry import EngineInfo, KvDelta, LinkInfo, WatchUpdate

COALESCE_S = 0.005
"""How long an urgent event waits for others of the same moment."""
MAX_HASHES = 65536
"""Hashes in one event (1 MiB); the rest of a large index follows in the next ones."""


class KvIndex:
    """The prefix-cache index of one engine connection, as its events tell it."""

    def __init__(self, engine: str, epoch: str) -> None:
        self.engine = engine
        self.epoch = epoch
        self.hashes: set[BlockHash] = set()


class WatchFeed:
    """Owns what is known and the list of watchers; `close` ends their streams. `links` is asked
    when an event is built, because ages move by themselves.
    """

    def __init__(
        self,
        agent: str,
        limits: Limits,
        links: Callable[[], tuple[LinkInfo, ...]] = tuple,
    ) -> None:
        self.agent = agent
        self.interval_s = limits.watch_interval_s
        self.history = limits.outcome_history
        self.links = links
        self.engine: EngineInfo | None = None
        self.index: KvIndex | None = None
        self.active: dict[str, None] = {}
        """Transfers that are in the load now, oldest first."""
        self.outcomes: deque[Outcome] = deque(maxlen=limits.outcome_history)
        self._watchers: set[Watcher] = set()
        self._closed = False

    def set_engine(self, info: EngineInfo) -> None:
        """State of the engine beside the agent."""
        if info != self.engine:
            self.engine = info
            for watcher in self._watchers:
                watcher.engine_changed()

    def set_index(self, engine: str, epoch: str, stored: Iterable[BlockHash]) -> None:
        """The engine's index is exactly `stored`."""
        self.index = KvIndex(engine, epoch)
        self.index.hashes.update(stored)
        for watcher in self._watchers:
            watcher.index_replaced()

    def change_index(self, stored: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        """Changes of the index; `removed` goes first. `set_index` must have come before."""
        if self.index is None:
            raise ValueError("the index is not known yet")
        stored, removed = set(stored), set(removed)
        self.index.hashes -= removed
        self.index.hashes |= stored
        for watcher in self._watchers:
            watcher.index_changed(stored, removed - stored)

    def forget_index(self) -> None:
        """The engine is gone: nothing is known of its cache."""
        if self.index is not None:
            self.index = None
            for watcher in self._watchers:
                watcher.refresh()

    def start(self, transfer_id: str) -> None:
        """A transfer is in the load from now on."""
        self.active[transfer_id] = None
        for watcher in self._watchers:
            watcher.add_started(transfer_id)

    def leave(self, transfer_id: str) -> None:
        """A transfer is over whose outcome is another agent's to tell."""
        self.active.pop(transfer_id, None)

    def finish(self, outcome: Outcome) -> None:
        """The outcome of a transfer."""
        self.active.pop(outcome.transfer_id, None)
        self.outcomes.append(outcome)
        for watcher in self._watchers:
            watcher.add_outcome(outcome)

    def close(self) -> None:
        """Streams end, each once it has had what was told before."""
        self._closed = True
        for watcher in self._watchers:
            watcher.hurry()

    async def watch(self) -> AsyncGenerator[WatchUpdate, None]:
        """Updates for one watcher, until the feed is closed."""
        watcher = Watcher(self)
        self._watchers.add(watcher)
        try:
            while True:
                closed = self._closed
                yield watcher.take()
                if closed:
                    return
                await watcher.wait()
        finally:
            self._watchers.discard(watcher)


class Watcher:
    """What one watcher has not seen yet. Owned by `WatchFeed.watch`."""

    def __init__(self, feed: WatchFeed) -> None:
        self._feed = feed
        self._seq = 0
        self._full = True
        self._engine = False
        self._cleared = False
        self._stored: set[BlockHash] = set()
        self._removed: set[BlockHash] = set()
        self._outcomes: list[Outcome] = []
        self._started: list[str] = []
        self._urgent = asyncio.Event()

    def hurry(self) -> None:
        """Do not wait for the interval."""
        self._urgent.set()

    def engine_changed(self) -> None:
        self._engine = True

    def index_replaced(self) -> None:
        index = self._feed.index
        if index is not None:
            self._cleared = True
            self._stored = set(index.hashes)
            self._removed.clear()

    def index_changed(self, stored: set[BlockHash], removed: set[BlockHash]) -> None:
        self._stored -= removed
        self._stored |= stored
        self._removed -= stored
        if not self._cleared:
            self._removed |= removed
        if len(self._removed) > MAX_HASHES:
            self.refresh()

    def add_started(self, transfer_id: str) -> None:
        self._started.append(transfer_id)
        self._event()

    def add_outcome(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._event()

    def refresh(self) -> None:
        """Fall back to full state."""
        self._full = True
        self._cleared = False
        for pending in (self._outcomes, self._started, self._stored, self._removed):
            pending.clear()

    async def wait(self) -> None:
        """Until the next update is due."""
        if not (self._cleared or self._stored):  # the rest of a large index goes on at once
            try:
                await asyncio.wait_for(self._urgent.wait(), self._feed.interval_s)
            except TimeoutError:
                return
        await asyncio.sleep(COALESCE_S)

    def take(self) -> WatchUpdate:
        """The next update; what it holds is seen then."""
        feed, full = self._feed, self._full
        if full:
            self.refresh()
            self.index_replaced()
            self._outcomes = list(feed.outcomes)
            self._started = list(feed.active)
        self._seq += 1
        update = WatchUpdate(
            seq=self._seq,
            full=full,
            agent=feed.agent,
            engines=(feed.engine,) if feed.engine and (full or self._engine) else (),
            kv=self._take_index(),
            links=feed.links(),
            outcomes=tuple(self._outcomes),
            started=tuple(self._started),
        )
        self._full = self._engine = False
        self._outcomes.clear()
        self._started.clear()
        self._urgent.clear()
        return update

    def _event(self) -> None:
        if len(self._outcomes) + len(self._started) > self._feed.history:
            self.refresh()
        self._urgent.set()

    def _take_index(self) -> tuple[KvDelta, ...]:
        index = self._feed.index
        if index is None or not (self._cleared or self._stored or self._removed):
            return ()
        stored = tuple(islice(self._stored, MAX_HASHES))
        delta = KvDelta(
            index.engine, index.epoch, self._cleared, stored, tuple(sorted(self._removed))
        )
        self._cleared = False
        self._removed.clear()
        self._stored.difference_update(stored)
        return (delta,)
