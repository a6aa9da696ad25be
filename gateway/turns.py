"""Requests that wait until an engine has room, so that what is let in stays fast under overload."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from gateway.records import TURN
from prfaas.errors import Overloaded

RETRY_AFTER_S = 1.0
LOOK_S = 0.05
"""Between two looks for room while somebody waits: engines say that they have some, not when."""


class Turns:
    """Lets as many requests go to the engines as these have room for; others wait, so many of them
    and so long. Who has the smallest key goes first, of equal keys who came first. Owns who waits,
    and a timer while anybody does; nothing to close.

    What waits in an engine takes its memory and its time from those whose answers have begun; what
    waits here costs nothing, and can still go to whichever engine has room first.
    """

    def __init__(self, room: Callable[[], int], most_waiting: int, wait_s: float) -> None:
        """`room`: how many requests all engines together may have now."""
        self._room = room
        self._most_waiting = most_waiting
        self._wait_s = wait_s
        self._queue: list[tuple[float, int, asyncio.Future[None]]] = []
        self._came: dict[int, None] = {}
        """Numbers of those that wait, in the order in which they came."""
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self.active = 0
        self.waiting = 0
        self.refused = 0
        """Since the start: who found the queue full, and who waited in vain."""
        self.overtakes = 0
        """Since the start: who went before one that had come earlier."""

    def __repr__(self) -> str:
        return f"<Turns active={self.active} waiting={self.waiting} refused={self.refused}>"

    async def enter(self, key: Callable[[], float]) -> None:
        """Wait for a turn, which `leave` ends; `key` is asked where there is none yet.

        Raises Overloaded.
        """
        if not self.waiting and self.active < self._room():
            self.active += 1
            return
        if self.waiting >= self._most_waiting:
            self.refused += 1
            raise Overloaded(
                f"the engines are full, and {self.waiting} requests wait already",
                retry_after_s=RETRY_AFTER_S,
            )
        await self._wait(key())

    def leave(self) -> None:
        self.active -= 1
        self.look()

    def look(self) -> None:
        """Let go who may go now."""
        while self._queue and self.active < self._room():
            _, number, turn = heapq.heappop(self._queue)
            if not turn.done():
                self.active += 1
                self.overtakes += number != next(iter(self._came))
                del self._came[number]
                turn.set_result(None)

    async def _wait(self, key: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        number = self._count
        self._came[number] = None
        waiting = (key, number, turn)
        heapq.heappush(self._queue, waiting)
        self.waiting += 1
        self.look()  # an engine may have come back meanwhile
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as exc:
            if turn.done() and not turn.cancelled():  # it came while its owner was leaving
                self.active -= 1
                self.look()
            turn.cancel()
            if not isinstance(exc, TimeoutError):
                raise
            self.refused += 1
            raise Overloaded(
                f"no engine had room within {self._wait_s:g} s",
                retry_after_s=RETRY_AFTER_S,
                phase=TURN,
            ) from None
        finally:
            self.waiting -= 1
            self._came.pop(number, None)
            if waiting in self._queue:
                self._queue.remove(waiting)
                heapq.heapify(self._queue)
            if not self.waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _tick(self) -> None:
        self.look()
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
