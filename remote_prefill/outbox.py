"""Frames on their way to the transport: in order, small messages first, coalesced while it is busy.

A slow transport makes the queue grow, so messages grow with it; on a fast one every frame leaves
as soon as it is encoded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from prfaas.errors import PrfaasError
from prfaas.frames import HEADER_BYTES
from prfaas.ledger import Piece

FIRST_MESSAGE_BYTES = 256 << 10
"""The first messages of a session: a cold connection delivers them sooner."""
FIRST_MESSAGES = 4
MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A piece as it will go on the wire."""

    piece: Piece
    raw_bytes: int
    digest: bytes
    codec: int
    payload: bytes
    cached: bool = False
    """Read from the engine's prefix cache, not computed now."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that leave in one message. `app_limited`: the transport had nothing to do before."""

    pieces: tuple[Encoded, ...]
    app_limited: bool


class Outbox:
    """Pieces being encoded and waiting to be sent; one producer, one consumer.

    Bounded by the session's retention. Futures are the producer's; the outbox only waits for them.
    """

    def __init__(self) -> None:
        self._queue: deque[asyncio.Future[Encoded]] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._error: PrfaasError | None = None
        self._failed = False
        """The last message after an error was taken."""
        self._messages = 0

    def put(self, piece: asyncio.Future[Encoded]) -> None:
        """Append a piece, possibly still being encoded."""
        self._queue.append(piece)
        piece.add_done_callback(lambda _: self._changed.set())
        self._changed.set()

    def end(self) -> None:
        """No more pieces will come."""
        self._ended = True
        self._changed.set()

    def fail(self, error: PrfaasError) -> None:
        """Stop: `take` gives one more message of what is encoded already, then raises `error`.

        So the other side learns of it soon, and keeps the chunks that were on their way.
        """
        self._error = error
        self._changed.set()

    async def take(self) -> Batch | None:
        """What to send next, waiting for it if need be; None after the end."""
        app_limited = False
        while True:
            self._changed.clear()
            ready = bool(self._queue) and self._queue[0].done()
            if self._error is not None and (self._failed or not ready):
                raise self._error
            if ready:
                self._failed = self._error is not None
                return Batch(tuple(self._pop_ready()), app_limited)
            if self._ended and not self._queue:
                return None
            app_limited = True
            await self._changed.wait()

    def _pop_ready(self) -> list[Encoded]:
        limit = FIRST_MESSAGE_BYTES if self._messages < FIRST_MESSAGES else MESSAGE_BYTES
        self._messages += 1
        pieces: list[Encoded] = []
        size = 0
        while self._queue and self._queue[0].done():
            piece = self._queue[0].result()
            size += HEADER_BYTES + len(piece.payload)
            if pieces and size > limit:
                break
            self._queue.popleft()
            pieces.append(piece)
        return pieces
