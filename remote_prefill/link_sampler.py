"""Looks at the links of an agent many times a second, and at how busy the agent's own thread is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from prfaas.clock import Clock
from remote_prefill.link_limit import ROUNDING_S, WINDOW_S

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Between two looks: often enough for a share of the last second, and of no weight."""


class LoopLoad:
    """How busy the thread of an event loop was in the last second; looked at from that thread."""

    def __init__(self, clock: Clock, cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._cpu_s = cpu_s
        self._last: tuple[float, float] | None = None
        self._looks: deque[tuple[float, float, float, float]] = deque()
        """(when, time passed, CPU time of it, how late this look came)"""

    @property
    def busy_share(self) -> float:
        """Of the time: computing, or not even come to look."""
        passed_s = sum(look[1] for look in self._looks)
        if passed_s <= 0:
            return 0.0
        cpu_s, late_s = sum(look[2] for look in self._looks), sum(look[3] for look in self._looks)
        return min(1.0, max(cpu_s, late_s) / passed_s)

    def look(self) -> None:
        """Called each LOOK_S, or as soon after that as the loop comes to it."""
        now_s, cpu_s = self._clock.now(), self._cpu_s()
        if self._last is not None:
            passed_s = now_s - self._last[0]
            late_s = max(0.0, passed_s - LOOK_S)
            self._looks.append((now_s, passed_s, cpu_s - self._last[1], late_s))
            while self._looks[0][0] <= now_s - WINDOW_S + ROUNDING_S:
                self._looks.popleft()
        self._last = (now_s, cpu_s)


class LinkSampler:
    """Owns the task that calls `look` every LOOK_S; `close` ends it. Needs a running loop."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._task = asyncio.create_task(self._run(), name="link sampler")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._look()
            except Exception:
                log.exception("looking at the links")
