"""One look at the gateway for all pages that watch: made once, sent to each as fast as it reads."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from gateway.dashboard.messages import Requests, State
from prfaas.errors import Overloaded

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Between two looks at the requests; every second one is at everything."""
LEISURE = 20
"""A look that took long is followed by a pause so many times as long: a twentieth of a core."""
MAX_WATCHERS = 64
MAX_BEHIND = 8
"""Messages about requests that wait for a page; more, and it misses the oldest."""
RETRY_AFTER_S = 10.0


class Watcher:
    """One page. Holds the newest state and a few messages, whatever it does not read."""

    def __init__(self) -> None:
        self._state: bytes | None = None
        self._requests: deque[bytes] = deque(maxlen=MAX_BEHIND)
        self._news = asyncio.Event()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Messages that it has not taken."""
        return len(self._requests) + (self._state is not None)

    def put_state(self, event: bytes) -> None:
        self._state = event
        self._news.set()

    def put_requests(self, event: bytes) -> None:
        self._requests.append(event)
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def next(self) -> bytes | None:
        """All that is new, once there is something; None at the end."""
        await self._news.wait()
        self._news.clear()
        if self._closed:
            return None
        parts = [*self._requests, *([self._state] if self._state is not None else [])]
        self._requests.clear()
        self._state = None
        return b"".join(parts)


class News(Protocol):
    """Says what requests are new, as `Latest` does."""

    def begin(self) -> Requests: ...

    def changed(self) -> Requests: ...

    def skip(self) -> None: ...


class Feed:
    """Owns the watchers. `run` looks while there are any, until cancelled; `close` ends them."""

    def __init__(self, state: Callable[[], State], latest: News) -> None:
        self._make_state = state
        self._latest = latest
        self._watchers: set[Watcher] = set()
        self._someone = asyncio.Event()
        self._encoder = msgspec.json.Encoder()
        self._closed = False

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Raises Overloaded where too many watch already."""
        if len(self._watchers) >= MAX_WATCHERS or self._closed:
            raise Overloaded("too many dashboards are open", retry_after_s=RETRY_AFTER_S)
        if not self._watchers:
            self._latest.skip()
        watcher = Watcher()
        self._watchers.add(watcher)
        self._someone.set()
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def opening(self) -> bytes:
        """What a page is sent first, so that it need not wait for the next look."""
        return self._event("requests", self._latest.begin()) + self._event(
            "state", self._make_state()
        )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        whole = False
        while True:
            if not self._watchers:
                self._someone.clear()
                await self._someone.wait()
            began = loop.time()
            try:
                self._look(whole)
            except Exception:  # the gateway goes on, and so does the next look
                logger.exception("the dashboard could not be drawn")
            whole = not whole
            await asyncio.sleep(max(TICK_S, LEISURE * (loop.time() - began)))

    def close(self) -> None:
        self._closed = True
        for watcher in self._watchers:
            watcher.close()

    def _look(self, whole: bool) -> None:
        changed = self._latest.changed()
        if changed.requests:
            event = self._event("requests", changed)
            for watcher in self._watchers:
                watcher.put_requests(event)
        if whole:
            event = self._event("state", self._make_state())
            for watcher in self._watchers:
                watcher.put_state(event)

    def _event(self, name: str, message: msgspec.Struct) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), self._encoder.encode(message))
