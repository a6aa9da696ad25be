"""One timer for the deadlines of many alike: they end in the order in which they began."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Task = asyncio.Task[Any]
K = TypeVar("K", bound=Hashable)


class Expiry(Generic[K]):
    """Tells which keys were not ended within `limit_s` after they began. Owns one timer while some
    wait; close it with `close`.

    A timer for each would be set and cancelled each time, for a limit that next to nobody reaches.
    """

    def __init__(self, limit_s: float, on_late: Callable[[K], None]) -> None:
        """`on_late` hears of each key once; it does not wait any more then."""
        self._limit_s = limit_s
        self._on_late = on_late
        self._until: dict[K, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._until)

    def begin(self, key: K) -> None:
        loop = asyncio.get_running_loop()
        at = self._until[key] = loop.time() + self._limit_s
        if self._timer is None:
            self._timer = loop.call_at(at, self._sweep, loop)

    def end(self, key: K) -> bool:
        """Whether it waited."""
        return self._until.pop(key, None) is not None

    def close(self) -> tuple[K, ...]:
        """Nothing is late any more; those that waited."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left = tuple(self._until)
        self._until.clear()
        return left

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell what is late, and come back when the next one would be."""
        self._timer = None
        now = loop.time()
        while self._until:
            key, at = next(iter(self._until.items()))
            if at > now:
                self._timer = loop.call_at(at, self._sweep, loop)
                return
            del self._until[key]
            self._on_late(key)


class Deadlines:
    """Cancels tasks that are not over `limit_s` after they began; close it with `close`."""

    def __init__(self, limit_s: float) -> None:
        self._running: Expiry[Task] = Expiry(limit_s, self._late)
        self._expired: set[Task] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, task: Task) -> None:
        """From now on; to be followed by `end`."""
        self._running.begin(task)

    def end(self, task: Task) -> None:
        self._running.end(task)
        self._expired.discard(task)

    def expired(self, task: Task) -> bool:
        """Asked by a task that was cancelled: whether the limit did it, and nobody else as well.

        Then the cancellation is taken back, and the task may go on.
        """
        return task in self._expired and task.uncancel() <= 0

    def close(self) -> None:
        self._running.close()

    def _late(self, task: Task) -> None:
        self._expired.add(task)
        task.cancel()
