"""An event loop whose clock jumps to whatever is due next: minutes of waiting take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing; moves the clock instead."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everything waits, and nothing is due")
        if not ready and timeout is not None and timeout > 0:
            self._clock.seconds += timeout
        return ready


class VirtualClock:
    """The loop's seconds, as a `Clock`."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return 1_700_000_000.0 + self.seconds


class VirtualLoop(asyncio.SelectorEventLoop):
    """For code without sockets or threads, which would take real time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        super().__init__(_Jumping(self.clock))

    def time(self) -> float:
        return self.clock.seconds


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in virtual time. Raises RuntimeError where everything waits for ever."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def virtual_clock() -> VirtualClock:
    """Of the loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.clock
