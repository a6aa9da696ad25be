"""Whose turn it is where more requests have come than engines are to have at once."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field

from gateway.records import TURN
from prfaas.errors import Overloaded, RateLimited
from prfaas.tenants import Tenant

RETRY_AFTER_S = 1.0
WAITING = "waiting"


@dataclass(order=True, slots=True)
class _Waiting:
    """Sorted as they go: the higher priority, then the earlier finish in virtual time."""

    order: tuple[int, float, int]
    tenant: str = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class FairQueue:
    """Lets `width` requests go at once; the others wait. Owns who waits; nothing to close.

    Priorities are strict. Among those of one priority it is weighted fair queueing, self-clocked
    (Golestani, 1994): a request is due at the virtual time at which its tenant, getting its share,
    would have been served all it has asked for; the clock is the due time of who went last. Costs
    are tokens. One tenant holds at most `most_waiting` places, so that none can keep others out.
    """

    def __init__(self, width: int, most_waiting: int, wait_s: float) -> None:
        """Width 0: nobody waits."""
        self._width = width
        self._most_waiting = most_waiting
        self._wait_s = wait_s
        self._heap: list[_Waiting] = []
        self._waiting: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._clock = 0.0
        self._count = 0
        self.active = 0

    def __repr__(self) -> str:
        return f"<FairQueue {self.active}/{self._width} active, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    def waiting_of(self, tenant: str) -> int:
        return self._waiting.get(tenant, 0)

    async def enter(self, tenant: Tenant, cost: float) -> None:
        """Wait for its turn, which `leave` ends. Raises RateLimited and Overloaded."""
        due = self._due_of(tenant, cost)
        if not self._width or self.active < self._width:
            self.active += 1
            self._due[tenant.name] = due
            self._clock = max(self._clock, due)
            return
        waiting = self.waiting_of(tenant.name)
        if waiting >= self._most_waiting:
            raise RateLimited(
                f"tenant {tenant.name}: {waiting} of its requests wait for their turn already",
                param=WAITING,
                retry_after_s=RETRY_AFTER_S,
            )
        self._due[tenant.name] = due
        self._count += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = _Waiting((-tenant.priority, due, self._count), tenant.name, turn)
        heapq.heappush(self._heap, entry)
        self._waiting[tenant.name] = waiting + 1
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except TimeoutError:
            self._not_taken(turn)
            raise Overloaded(
                f"no turn came within {self._wait_s:g} s",
                retry_after_s=RETRY_AFTER_S,
                phase=TURN,
            ) from None
        except BaseException:
            self._not_taken(turn)
            raise
        finally:
            self._forget(tenant.name)

    def leave(self) -> None:
        """One who had a turn is through: it is the next one's."""
        self.active -= 1
        while self._heap and self.active < self._width:
            entry = heapq.heappop(self._heap)
            if entry.turn.done():  # it has left
                continue
            self._clock = max(self._clock, entry.order[1])
            self.active += 1
            entry.turn.set_result(None)
        if not self._heap:
            self._due.clear()  # nobody is behind anybody any more

    def _due_of(self, tenant: Tenant, cost: float) -> float:
        start = max(self._clock, self._due.get(tenant.name, 0.0))
        return start + max(1.0, cost) / tenant.weight

    def _not_taken(self, turn: asyncio.Future[None]) -> None:
        """A turn that came while its owner was leaving goes on to the next one."""
        if turn.done() and not turn.cancelled():
            self.leave()
        else:
            turn.cancel()

    def _forget(self, tenant: str) -> None:
        left = self._waiting.pop(tenant) - 1
        if left:
            self._waiting[tenant] = left
