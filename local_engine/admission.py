"""Which requests are live and how many wait, shared by submitters and the engine thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from prfaas.errors import EngineUnavailable, InvalidRequest, Overloaded


class Admission:
    """Owns the set of live request ids; thread-safe, nothing to close.

    A request waits from `enter` to `started`, and while its client is too slow; only so many may.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._live: set[str] = set()
        self._waiting: set[str] = set()
        self._refusal: str | None = None

    def enter(self, request_id: str, retry_after_s: float, post: Callable[[], object]) -> None:
        """Admit a request and call `post`. Raises Overloaded, EngineUnavailable, InvalidRequest."""
        with self._lock:
            if self._refusal is not None:
                raise EngineUnavailable(self._refusal, retry_after_s=retry_after_s)
            if request_id in self._live:
                raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
            if len(self._waiting) >= self._max_waiting:
                raise Overloaded(
                    f"{len(self._waiting)} requests wait in this engine already",
                    retry_after_s=retry_after_s,
                )
            self._live.add(request_id)
            self._waiting.add(request_id)
            # Inside the lock, so that nothing is posted after `refuse` has returned.
            post()

    def started(self, request_id: str) -> None:
        """It decodes, and its client reads."""
        with self._lock:
            self._waiting.discard(request_id)

    def paused(self, request_id: str) -> None:
        """Its client is too slow; it counts as waiting again."""
        with self._lock:
            self._waiting.add(request_id)

    def leave(self, request_id: str) -> None:
        """It has ended."""
        with self._lock:
            self._live.discard(request_id)
            self._waiting.discard(request_id)

    def refuse(self, reason: str) -> None:
        """Admit nothing from now on."""
        with self._lock:
            self._refusal = reason
