"""Token events on their way from the engine thread to one asyncio consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from local_engine.requests import TokenEvent
from prfaas.clock import Clock


class TokenStream:
    """Async iterator over one request's events; whoever stops early must `aclose`, which cancels.

    Bounded: at `limit` unread events the engine passes the sequence over until half are read.
    `push` is the engine thread's, everything else the consumer's event loop's.
    """

    def __init__(
        self,
        limit: int,
        clock: Clock,
        *,
        on_close: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.read_at = clock.now()
        self._limit = limit
        self._clock = clock
        self._on_close = on_close
        self._on_room = on_room
        self._events: deque[TokenEvent] = deque()
        self._ready = asyncio.Event()
        self._full = False
        self._ended = False

    @property
    def full(self) -> bool:
        """The consumer is so far behind that the sequence must pause."""
        return self._full and len(self._events) > self._limit // 2

    def push(self, event: TokenEvent) -> None:
        """Append an event; the consumer sees it after the next `wake`."""
        self._events.append(event)
        if len(self._events) >= self._limit:
            self._full = True

    def wake(self) -> None:
        """Tell the consumer that there are events; called on its loop."""
        self._ready.set()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events and not self._ended:
            self._ready.clear()
            await self._ready.wait()
        if self._ended:
            raise StopAsyncIteration
        event = self._events.popleft()
        self.read_at = self._clock.now()
        if self._full and len(self._events) <= self._limit // 2:
            self._full = False
            self._on_room()
        if event.last:
            self._ended = True
        return event

    def abandon(self) -> None:
        """Cancel the request unless it has ended; what is buffered is dropped."""
        if not self._ended:
            self._ended = True
            self._events.clear()
            self._on_close()

    async def aclose(self) -> None:
        """End the iteration and cancel the request if it has not ended. Idempotent."""
        self.abandon()
        self._ready.set()


def wake_all(streams: Iterable[TokenStream]) -> None:
    """Wake consumers from another thread, once for each of their loops."""
    by_loop: dict[asyncio.AbstractEventLoop, list[TokenStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_group, group)
        except RuntimeError:  # The loop is closed, and its consumers with it.
            for stream in group:
                stream.abandon()


def _wake_group(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream.wake()
