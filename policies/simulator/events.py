"""Virtual time: callbacks in order of time, ties in the order they were set."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Call = Callable[[Any], None]


class EventLoop:
    """Owns the clock and what is still to come; nothing to close.

    Times are seconds. A callback that is not wanted any more is left in place by its owner, who
    compares a version when it fires: cheaper than to search the heap.
    """

    __slots__ = ("_heap", "_order", "fired", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.fired = 0
        self._heap: list[tuple[float, int, Call, Any]] = []
        self._order = 0

    def at(self, time_s: float, call: Call, argument: Any = None) -> None:
        """Call at a time, which is not before now."""
        self._order = order = self._order + 1
        heapq.heappush(self._heap, (time_s, order, call, argument))

    def run_until(self, time_s: float) -> None:
        """Fire everything up to and including `time_s`; the clock then shows it."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= time_s:
            self.now, _, call, argument = pop(heap)
            self.fired += 1
            call(argument)
        if time_s > self.now:
            self.now = time_s

    def run_out(self) -> None:
        """Fire everything there is."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, call, argument = pop(heap)
            self.fired += 1
            call(argument)
