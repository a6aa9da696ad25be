"""Who in this process hears what gateways have just sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prfaas.cluster_state import Sent


class Listeners:
    """Owns the list of them; nothing to close."""

    def __init__(self) -> None:
        self._all: list[Callable[[Sent], None]] = []

    def __len__(self) -> int:
        return len(self._all)

    def pass_on(self, sent: Sent) -> None:
        """To all who hear now."""
        for take in tuple(self._all):
            take(sent)

    async def hear(self, take: Callable[[Sent], None]) -> None:
        """Until cancelled."""
        self._all.append(take)
        try:
            await asyncio.Event().wait()
        finally:
            self._all.remove(take)
