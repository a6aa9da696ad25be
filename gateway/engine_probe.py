"""Whether a decode engine answers, asked every second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.upstream import Upstream

INTERVAL_S = 1.0


class EngineProbe:
    """Asks the engine's `/health` until cancelled; `reachable` is the last answer."""

    def __init__(
        self, upstream: Upstream, timeout_s: float, on_change: Callable[[bool], None]
    ) -> None:
        self._upstream = upstream
        self._timeout_s = timeout_s
        self._on_change = on_change
        self.reachable = False
        self.losses = 0
        """How often it was lost."""

    async def run(self) -> None:
        """Never returns; ends by being cancelled."""
        while True:
            reachable = await self._upstream.healthy(self._timeout_s)
            if reachable != self.reachable:
                self.reachable = reachable
                self.losses += not reachable
                self._on_change(reachable)
            await asyncio.sleep(INTERVAL_S)
