"""Pieces of an answer to an HTTP response: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from local_engine.http.answers import AnswerShape, Usage, error_event
from local_engine.http.text import Piece
from prfaas.errors import PrfaasError

log = logging.getLogger(__name__)

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Asks reverse proxies not to collect events before they pass them on.
    "X-Accel-Buffering": "no",
}


async def respond_whole(
    shape: AnswerShape, pieces: AsyncIterator[Piece], prompt_tokens: int
) -> web.Response:
    """The answer in one body."""
    text: list[str] = []
    token_ids: list[int] = []
    async for piece in pieces:
        text.append(piece.text)
        token_ids.extend(piece.token_ids)
        if piece.reason is not None:
            usage = _usage(piece, prompt_tokens)
            body = shape.whole("".join(text), token_ids, piece.reason, usage)
            return web.Response(body=body, content_type="application/json")
    raise AssertionError("an answer ends with a reason or an error")


async def respond_stream(
    request: web.Request,
    shape: AnswerShape,
    pieces: AsyncIterator[Piece],
    prompt_tokens: int,
    slow_client_timeout_s: float,
) -> web.StreamResponse:
    """The answer as events.

    Not even headers go out before the first piece, so an error until then is the caller's to
    answer with its status. A later one becomes an event, and the stream ends without [DONE].
    """
    piece = await anext(pieces)
    response = web.StreamResponse(headers=_SSE_HEADERS)
    await response.prepare(request)
    writer = _Writer(request, response, slow_client_timeout_s)
    data = shape.first(piece.text)
    try:
        while piece.reason is None:
            if data:
                await writer.write(data)
            piece = await anext(pieces)
            data = shape.more(piece.text) if piece.text else b""
        await writer.write(data + shape.end(piece.reason, _usage(piece, prompt_tokens)))
    except PrfaasError as error:
        await writer.write(error_event(error))
    except ConnectionError:
        raise
    except Exception:
        log.exception("stream failed")
        await writer.write(error_event(PrfaasError("internal error")))
    await response.write_eof()
    return response


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


def _usage(piece: Piece, prompt_tokens: int) -> Usage:
    return Usage.of(
        prompt_tokens, piece.completion_tokens, piece.cached_tokens, piece.kv_quality
    )
