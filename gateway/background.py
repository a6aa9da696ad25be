"""Work that goes on beside the requests until the gateway stops, whatever one round of it meets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
"""After a fault, before it begins again."""


def in_background(what: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """A task that is `run`, begun again after an error, which is told; whoever asks for it cancels
    it. Without that one fault of ours would end a loop for good, and nobody would hear of it.
    """
    return asyncio.create_task(_kept_up(what, run))


async def _kept_up(what: str, run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            return await run()
        except Exception:
            logger.exception("%s failed: it begins again in %g s", what, AGAIN_S)
        await asyncio.sleep(AGAIN_S)
