"""Sockets whose clients do not read what was written for them: they are cut after a while."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

MOST_BYTES = 64 << 10
"""In the buffer of a socket, beyond which asyncio has its writer wait."""


@dataclass(slots=True)
class _Waiting:
    """What was last seen to wait in a socket's buffer, and since when none of it has gone."""

    nbytes: int = 0
    since: float = 0.0


class Unread:
    """Knows the sockets of clients until they are closed; owns none, and closes nothing of its own.

    A transport that was told to close stays open until its buffer is read, and a writer that waits
    for a buffer need not have a deadline: a client that reads nothing would keep both for ever.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, transport: asyncio.Transport) -> None:
        self._waiting[transport] = _Waiting()

    def sweep(self, now: float, slow_s: float) -> None:
        """Cut those of which nothing was read for `slow_s`, and forget those that are closed."""
        for transport, waiting in tuple(self._waiting.items()):
            closing = transport.is_closing()
            nbytes = transport.get_write_buffer_size()
            if closing and not nbytes:
                del self._waiting[transport]
            elif not closing and nbytes <= MOST_BYTES:
                waiting.nbytes = 0
            elif not waiting.nbytes or nbytes < waiting.nbytes:
                waiting.nbytes, waiting.since = nbytes, now
            elif now - waiting.since > slow_s:
                transport.abort()
                del self._waiting[transport]
