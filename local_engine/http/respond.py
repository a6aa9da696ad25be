"""Pieces of an answer to an HTTP response: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from local_engine.http.answers import AnswerShape, Usage, error_event
from local_engine.http.text import Piece, join
from prfaas.errors import PrfaasError

log = logging.getLogger(__name__)

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Asks reverse proxies not to collect events before they pass them on.
    "X-Accel-Buffering": "no",
}


async def respond_whole(
    shape: AnswerShape, pieces: AsyncIterator[Piece], tally: Tally
) -> web.Response:
    """The answers in one body."""
    found: dict[int, list[Piece]] = {}
    while not tally.complete:
        piece = await anext(pieces)
        found.setdefault(piece.index, []).append(piece)
        tally.add(piece)
    body = shape.whole([join(parts) for _, parts in sorted(found.items())], tally.usage())
    return web.Response(body=body, content_type="application/json")


async def respond_stream(
    request: web.Request,
    shape: AnswerShape,
    pieces: AsyncIterator[Piece],
    tally: Tally,
    slow_client_timeout_s: float,
) -> web.StreamResponse:
    """The answers as events, as their pieces come.

    Not even headers go out before the first piece, so an error until then is the caller's to
    answer with its status. A later one becomes an event, and the stream ends without [DONE].
    """
    piece = await anext(pieces)
    response = web.StreamResponse(headers=_SSE_HEADERS)
    await response.prepare(request)
    writer = _Writer(request, response, slow_client_timeout_s)
    try:
        while True:
            say = shape.more if tally.knows(piece) else shape.first
            tally.add(piece)
            so_far = tally.usage() if shape.usage_each else None
            data = say(piece, so_far)
            if piece.reason is not None:
                data += shape.last(piece, so_far)
            if tally.complete:
                await writer.write(data + shape.end(tally.usage()))
                break
            if data:
                await writer.write(data)
            piece = await anext(pieces)
    except PrfaasError as error:
        await writer.write(error_event(error))
    except ConnectionError:
        raise
    except Exception:
        log.exception("stream failed")
        await writer.write(error_event(PrfaasError("internal error")))
    await response.write_eof()
    return response


class Tally:
    """How far the answers to one request are; nothing to close."""

    def __init__(self, prompt_tokens: int, answers: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._answers = answers
        self._latest: dict[int, Piece] = {}

    def knows(self, piece: Piece) -> bool:
        """There was a piece of its answer before."""
        return piece.index in self._latest

    def add(self, piece: Piece) -> None:
        self._latest[piece.index] = piece

    @property
    def complete(self) -> bool:
        """All answers have ended."""
        ended = sum(piece.reason is not None for piece in self._latest.values())
        return ended == self._answers

    def usage(self) -> Usage:
        """Of all answers together.

        What one of them computed the others may find cached; tokens count as cached that none did.
        """
        latest = self._latest.values()
        return Usage.of(
            self._prompt_tokens,
            sum(piece.completion_tokens for piece in latest),
            min(piece.cached_tokens for piece in latest),
            next(iter(latest)).kv_quality,
        )


class _Writer:
    """Writes to one client and gives up on it when it reads nothing for too long."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, timeout_s: float
    ) -> None:
        self._request = request
        self._response = response
        self._timeout_s = timeout_s

    async def write(self, data: bytes) -> None:
        """Returns at once until the socket's buffers are full. Raises ConnectionError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionAbortedError("the client reads nothing") from error
