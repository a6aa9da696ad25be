"""The socket at which workers meet: each is told what is known, and tells what it does."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gateway.cluster_view import ClusterView, Feed
from gateway.members import Members
from gateway.workers.frames import Frames
from gateway.workers.messages import (
    Answer,
    Fed,
    FromWorker,
    Heard,
    Hello,
    Leave,
    MembersAre,
    Tell,
    TellSent,
    ToWorker,
    Unfed,
)
from prfaas.clock import Clock
from prfaas.cluster_state import ClusterStore, Sent
from prfaas.errors import ProtocolError
from prfaas.hashing import BlockHash
from prfaas.telemetry import KvDelta, WatchUpdate

logger = logging.getLogger(__name__)

HELLO_S = 10.0
"""Who has not said by then which worker it is, is none."""
BLOCKS_AT_ONCE = 1 << 16
"""Of a prefix index, in one message."""


class Connected:
    """One worker, as it last said."""

    def __init__(self, index: int, frames: Frames[FromWorker]) -> None:
        self.index = index
        self.frames = frames
        self.member_ids: set[str] = set()
        self.granted_tokens = 0
        self.leaving: frozenset[str] = frozenset()


class StateServer:
    """Owns the socket and its connections; close it with `close`. Borrows store and view."""

    def __init__(
        self,
        path: Path,
        store: ClusterStore,
        view: ClusterView,
        members: Callable[[], Members],
        clock: Clock,
    ) -> None:
        self._path = path
        self._store = store
        self._view = view
        self._members = members
        self._clock = clock
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self.workers: list[Connected] = []

    @property
    def leaving(self) -> frozenset[str]:
        """Engines that have left and still answer some worker's requests."""
        return frozenset().union(*(worker.leaving for worker in self.workers))

    async def start(self) -> None:
        """Listen, in place of whoever did. Raises OSError."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, self._path)
        os.chmod(self._path, 0o600)
        task = asyncio.create_task(self._store.hear_sent(self._pass_on))
        self._tasks.add(task)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tell(self, message: ToWorker) -> None:
        """To all workers."""
        if self.workers:
            data = self._encoder.encode(message)
            for worker in self.workers:
                worker.frames.put_packed(data)

    def _pass_on(self, sent: Sent) -> None:
        """To all workers but the one that told."""
        data = b""
        for worker in self.workers:
            if sent.member not in worker.member_ids:
                data = data or self._encoder.encode(Heard(sent))
                worker.frames.put_packed(data)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(Frames(reader, writer, FromWorker)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, frames: Frames[FromWorker]) -> None:
        """One worker, until it is gone."""
        worker: Connected | None = None
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await frames.next()
            if not isinstance(hello, Hello):
                raise ProtocolError("the first message is no Hello")
            worker = Connected(hello.index, frames)
            # All in one go: nothing comes in between what is known and what changes.
            frames.put(MembersAre.of(self._members()))
            for known in self._known():
                frames.put(known)
            self.workers.append(worker)
            while (message := await frames.next()) is not None:
                if isinstance(message, Tell):
                    await self._told(worker, message)
                elif isinstance(message, TellSent):
                    await self._store.tell_sent(message.sent)
                elif isinstance(message, Leave):
                    worker.member_ids.discard(message.member_id)
                    await self._store.leave(message.member_id)
                else:
                    raise ProtocolError("a second Hello")
        except ProtocolError as exc:
            logger.error("a worker does not speak as this process does: %s", exc.message)
        except TimeoutError:
            logger.error("somebody connected and said nothing")
        finally:
            if worker is not None:
                if worker in self.workers:
                    self.workers.remove(worker)
                for member_id in worker.member_ids:
                    await self._store.leave(member_id)
            await frames.abort()

    async def _told(self, worker: Connected, tell: Tell) -> None:
        worker.member_ids.add(tell.report.member.id)
        worker.granted_tokens = tell.granted_tokens
        worker.leaving = frozenset(tell.leaving)
        shared = await self._store.exchange(tell.report)
        granted = sum(other.granted_tokens for other in self.workers if other is not worker)
        worker.frames.put(Answer(self._clock.now(), shared, granted))

    def _known(self) -> Iterator[ToWorker]:
        now = self._clock.now()
        for place, feed in self._view.feeds.items():
            if feed.heard_at is None:
                continue
            age_s = feed.age_s(now)
            held = self._view.index.held(place)
            for update in _updates(feed, held):
                yield Fed(place, update, age_s)
            if not feed.connected:
                yield Unfed(place)


def _updates(feed: Feed, held: tuple[str, tuple[BlockHash, ...]] | None) -> Iterator[WatchUpdate]:
    """What a feed has told so far, as events."""
    name = feed.engine.name
    links = (*feed.links.values(), *feed.served_links.values())
    kv: tuple[KvDelta, ...] = ()
    blocks: tuple[BlockHash, ...] = ()
    epoch = ""
    if held is not None:
        epoch, blocks = held
        kv = (KvDelta(name, epoch, cleared=True, stored=blocks[:BLOCKS_AT_ONCE]),)
    yield WatchUpdate(0, True, feed.agent, (feed.engine,), kv, links)
    for at in range(BLOCKS_AT_ONCE, len(blocks), BLOCKS_AT_ONCE):
        more = KvDelta(name, epoch, stored=blocks[at : at + BLOCKS_AT_ONCE])
        yield WatchUpdate(0, False, feed.agent, kv=(more,))
