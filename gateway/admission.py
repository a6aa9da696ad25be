"""What the gateway lets in, and how much work may still fall back on D."""

from __future__ import annotations

import asyncio

from prfaas.errors import Overloaded

RETRY_AFTER_S = 1.0


class Admission:
    """Counts requests in flight; one too many is refused at once, not queued."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._empty = asyncio.Event()
        self._empty.set()
        self.in_flight = 0
        self.peak = 0
        self.draining = False

    def enter(self) -> None:
        """Take a place, to be given back with `leave`. Raises Overloaded."""
        if self.draining:
            raise Overloaded("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        if self.in_flight >= self._max_in_flight:
            raise Overloaded(
                f"{self._max_in_flight} requests are in flight, which is the limit",
                retry_after_s=RETRY_AFTER_S,
            )
        if not self.in_flight:
            self._empty.clear()
        self.in_flight += 1
        if self.in_flight > self.peak:
            self.peak = self.in_flight

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until nothing is in flight; the caller bounds it."""
        await self._empty.wait()


class FallbackBudget:
    """Uncached tokens of offloads that may still come back to D to be prefilled there.

    A grant ends when the outcome is known, the first token comes or the response ends, whichever is
    first; the last always happens within `request_timeout_s`.
    """

    def __init__(self, total_tokens: int) -> None:
        self.total_tokens = total_tokens
        self.granted_tokens = 0
        self.others_tokens = 0
        """Granted by other workers of this gateway, as last heard."""
        self._grants: dict[str, int] = {}

    @property
    def free_tokens(self) -> int:
        return max(0, self.total_tokens - self.granted_tokens - self.others_tokens)

    def grant(self, transfer_id: str, tokens: int) -> bool:
        """Whether this offload may fall back to D; counts against the budget until `finish`."""
        if transfer_id in self._grants or tokens > self.free_tokens:
            return False
        self._grants[transfer_id] = tokens
        self.granted_tokens += tokens
        return True

    def finish(self, transfer_id: str) -> None:
        if transfer_id in self._grants:
            self.granted_tokens -= self._grants.pop(transfer_id)
