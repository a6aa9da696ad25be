"""A worker's side of the socket: what it is told goes into its view, what it does is told."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.admission import FallbackBudget
from gateway.cluster_view import ClusterView
from gateway.members import Members
from gateway.state.listeners import Listeners
from gateway.workers.frames import Frames
from gateway.workers.messages import (
    Answer,
    Fed,
    Heard,
    Hello,
    Leave,
    MembersAre,
    Tell,
    TellSent,
    ToWorker,
)
from prfaas.clock import Clock
from prfaas.cluster_state import Report, Sent, Shared
from prfaas.errors import ConfigError, ProtocolError, StateUnavailable
from prfaas.snapshot import Outcome

logger = logging.getLogger(__name__)

RETRY_S = 0.05
"""Between two tries to reach the process that keeps the state."""
PEAK_S = 60.0
"""The oldest snapshot is told of the last one to two of these."""


@dataclass(frozen=True, slots=True)
class Hearers:
    """Parts of a worker's gateway that hear what is told; borrowed."""

    view: ClusterView
    budget: FallbackBudget
    apply: Callable[[Members], Awaitable[None]]
    on_outcome: Callable[[Outcome], None]
    leaving: Callable[[], tuple[str, ...]]


class WorkerLink:
    """The store of a worker, and what feeds its view. `start` it; close it with `close`.

    Where the other side is gone it goes on trying, and what is known gets old.
    """

    def __init__(self, path: Path, index: int, clock: Clock, timeout_s: float) -> None:
        self._path = path
        self._index = index
        self._clock = clock
        self._timeout_s = timeout_s
        self._frames: Frames[ToWorker] | None = None
        self._up = asyncio.Event()
        self._waiting: deque[asyncio.Future[Answer]] = deque()
        self._hearers: Hearers | None = None
        self._listeners = Listeners()
        self._task: asyncio.Task[None] | None = None
        self._peaks = (0.0, 0.0)
        self._peak_until = 0.0
        self.heard_at: float | None = None
        self.losses = 0

    @property
    def up(self) -> bool:
        return self._up.is_set()

    @property
    def age_s(self) -> float:
        """Of what this worker knows; infinite: never heard."""
        return float("inf") if self.heard_at is None else self._clock.now() - self.heard_at

    @property
    def peak_age_s(self) -> float:
        """The most of late."""
        self._note_age()
        return max(self._peaks)

    async def members(self, within_s: float) -> Members:
        """Connect, and hear who belongs: what a gateway is made from. Raises StateUnavailable."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    found = await self._open()
                    if found is not None:
                        return found
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as exc:
            raise StateUnavailable("the process that keeps the state does not answer") from exc

    def start(self, hearers: Hearers) -> None:
        """What is told from now on goes there, until it is closed."""
        self._hearers = hearers
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            frames = self._frames
            if frames is None:
                members = await self._open()
                if members is None:
                    await asyncio.sleep(RETRY_S)
                    continue
                logger.info("in touch with the process that keeps the state again")
                await self._applied(members)
                continue
            try:
                while (message := await frames.next()) is not None:
                    await self._heard(message)
            except ProtocolError as exc:
                logger.error("the process that keeps the state speaks otherwise: %s", exc.message)
            except Exception:  # all is told anew on the next connection
                logger.exception("what the process that keeps the state told cannot be taken in")
            await self._lost(frames)

    async def exchange(self, report: Report) -> Shared:
        """Raises StateUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._up.wait()
                frames, hearers = self._frames, self._hearers
                if frames is None:  # lost again before this task was woken
                    raise StateUnavailable("the process that keeps the state is gone")
                granted = 0 if hearers is None else hearers.budget.granted_tokens
                leaving = () if hearers is None else hearers.leaving()
                waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
                self._waiting.append(waiting)
                frames.put(Tell(report, granted, leaving))
                answer = await waiting
        except TimeoutError as exc:
            raise StateUnavailable("the process that keeps the state does not answer") from exc
        return answer.shared

    async def tell_sent(self, sent: Sent) -> None:
        """Raises StateUnavailable."""
        if self._frames is None:
            raise StateUnavailable("the process that keeps the state is gone")
        self._frames.put(TellSent(sent))

    async def hear_sent(self, take: Callable[[Sent], None]) -> None:
        """Goes on by itself once the other side is back."""
        await self._listeners.hear(take)

    async def leave(self, member_id: str) -> None:
        """Raises StateUnavailable."""
        if self._frames is None:
            raise StateUnavailable("the process that keeps the state is gone")
        self._frames.put(Leave(member_id))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        frames, self._frames = self._frames, None
        if frames is not None:
            await frames.close()

    async def _open(self) -> Members | None:
        """A new connection; None where there is nobody."""
        frames: Frames[ToWorker] | None = None
        members = None
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
            frames = Frames(reader, writer, ToWorker)
            frames.put(Hello(self._index))
            first = await frames.next()
            members = first.members() if isinstance(first, MembersAre) else None
        except OSError:
            pass
        except ProtocolError as exc:
            logger.error("the process that keeps the state speaks otherwise: %s", exc.message)
        if members is None:
            if frames is not None:
                await frames.abort()
            return None
        self._frames = frames
        self._up.set()
        return members

    async def _heard(self, message: ToWorker) -> None:
        hearers = self._hearers
        if isinstance(message, Answer):
            self._note_age()
            self.heard_at = message.at
            if hearers is not None:
                hearers.budget.others_tokens = message.granted_tokens
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, Heard):
            self._listeners.pass_on(message.sent)
        elif hearers is None:
            pass
        elif isinstance(message, Fed):
            for outcome in hearers.view.update(message.place, message.update, message.age_s):
                hearers.on_outcome(outcome)
        elif isinstance(message, MembersAre):
            await self._applied(message.members())
        else:
            hearers.view.disconnected(message.place)

    async def _applied(self, members: Members) -> None:
        if self._hearers is None:
            return
        try:
            await self._hearers.apply(members)
        except ConfigError as exc:
            logger.error("engines and peers stay as they are: %s", exc.message)

    async def _lost(self, frames: Frames[ToWorker]) -> None:
        """The connection is gone: what is known stays, and gets old."""
        self._frames = None
        self._up.clear()
        self.losses += 1
        logger.warning(
            "the process that keeps the state is gone: this worker goes on with what it knows"
        )
        gone = StateUnavailable("the process that keeps the state is gone")
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(gone)
        await frames.abort()

    def _note_age(self) -> None:
        """The oldest is what was known just before something new came."""
        now = self._clock.now()
        if self.heard_at is None:
            return
        if now >= self._peak_until:
            recent = self._peaks[1] if now < self._peak_until + PEAK_S else 0.0
            self._peaks, self._peak_until = (recent, 0.0), now + PEAK_S
        self._peaks = (self._peaks[0], max(self._peaks[1], now - self.heard_at))
