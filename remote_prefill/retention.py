"""Host memory for encoded KV at P: reserved for a whole session before its prefill is admitted.

So nothing blocks in the middle of a forward pass and nothing overflows; who does not fit waits its
turn or is refused.
"""

from __future__ import annotations

import asyncio
from collections import deque

from prfaas.errors import InvalidRequest, Overloaded


class Ticket:
    """A place in the pool or in its queue; its owner calls `release` once."""

    def __init__(self, pool: RetentionPool, nbytes: int) -> None:
        self.nbytes = nbytes
        self.granted = asyncio.Event()
        self._pool = pool

    @property
    def position(self) -> int:
        """0 once granted, else the place in the queue, from 1."""
        return self._pool.position(self)

    def shrink(self, nbytes: int) -> None:
        """No more than so many bytes are needed from now on; only once granted."""
        self._pool.shrink(self, nbytes)

    def release(self) -> None:
        """Give back the bytes, or leave the queue. Idempotent."""
        self._pool.release(self)


class RetentionPool:
    """Counts `capacity` bytes and the sessions that wait for them, first come first served."""

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self.capacity = capacity
        self._max_waiting = max_waiting
        self._held: set[Ticket] = set()
        self._waiting: deque[Ticket] = deque()
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that a new session could have at once; none while others wait."""
        return 0 if self._waiting else self.capacity - self.used_bytes

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def request(self, nbytes: int, *, retry_after_s: float) -> Ticket:
        """A ticket, granted already or queued.

        Raises InvalidRequest for what can never fit and Overloaded when the queue is full.
        """
        if nbytes > self.capacity:
            raise InvalidRequest(
                f"a session of {nbytes} bytes can never fit retention of {self.capacity}",
                param="tokens",
            )
        ticket = Ticket(self, nbytes)
        if not self._waiting and self.used_bytes + nbytes <= self.capacity:
            self._grant(ticket)
        elif len(self._waiting) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} sessions wait for retention already",
                retry_after_s=retry_after_s,
            )
        else:
            self._waiting.append(ticket)
        return ticket

    def position(self, ticket: Ticket) -> int:
        return 0 if ticket in self._held else self._waiting.index(ticket) + 1

    def shrink(self, ticket: Ticket, nbytes: int) -> None:
        if ticket in self._held and nbytes < ticket.nbytes:
            self.used_bytes -= ticket.nbytes - nbytes
            ticket.nbytes = nbytes
            self._serve()

    def release(self, ticket: Ticket) -> None:
        if ticket in self._held:
            self._held.remove(ticket)
            self.used_bytes -= ticket.nbytes
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self.used_bytes + self._waiting[0].nbytes <= self.capacity:
            self._grant(self._waiting.popleft())

    def _grant(self, ticket: Ticket) -> None:
        self._held.add(ticket)
        self.used_bytes += ticket.nbytes
        ticket.granted.set()
