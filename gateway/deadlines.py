"""One timer for the deadlines of all requests: they are alike, so they end as they began."""

from __future__ import annotations

import asyncio
from typing import Any

Task = asyncio.Task[Any]


class Deadlines:
    """Cancels tasks that are not over `limit_s` after they began. Owns one timer while some run;
    close it with `close`.

    `asyncio.timeout` sets and cancels a timer each time, for a limit that next to nobody reaches.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._running: dict[Task, float] = {}
        self._expired: set[Task] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, task: Task) -> None:
        """From now on; to be followed by `end`."""
        loop = task.get_loop()
        at = self._running[task] = loop.time() + self._limit_s
        if self._timer is None:
            self._timer = loop.call_at(at, self._sweep, loop)

    def end(self, task: Task) -> None:
        self._running.pop(task, None)
        self._expired.discard(task)

    def expired(self, task: Task) -> bool:
        """Asked by a task that was cancelled: whether the limit did it, and nobody else as well.

        Then the cancellation is taken back, and the task may go on.
        """
        return task in self._expired and task.uncancel() <= 0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel what is late, and come back when the next one would be."""
        self._timer = None
        now = loop.time()
        while self._running:
            task, at = next(iter(self._running.items()))
            if at > now:
                self._timer = loop.call_at(at, self._sweep, loop)
                return
            del self._running[task]
            self._expired.add(task)
            task.cancel()
