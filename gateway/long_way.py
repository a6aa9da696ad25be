"""The long way of a request: aiohttp's protocol, with its own refusals in OpenAI's shape."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import (
    ContentEncodingError,
    HttpProcessingError,
    InvalidURLError,
    LineTooLong,
)

from gateway.answers import REQUEST_ID_HEADER, error_answer
from gateway.ids import Ids
from prfaas.errors import InvalidRequest, PrfaasError

MAX_REASON_CHARS = 200


class LongWay(web.RequestHandler):
    """One connection that has left the short way; as aiohttp's, it belongs to its server.

    What never gets as far as a handler is answered here: bytes that are no HTTP, and expectations.
    """

    __slots__ = ("_ids",)

    def __init__(self, server: web.Server, ids: Ids, **settings: Any) -> None:
        """`settings` are aiohttp's."""
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)
        self._ids = ids

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The connection is closed after it. Raises ConnectionError where an answer has begun."""
        super().handle_error(request, status, exc, message)  # logs, and raises
        response = self._refusal(*_of_parser(status, exc))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Of what aiohttp refuses before it has looked for a handler."""
        if isinstance(resp, web.HTTPException):
            resp = self._refusal(resp.status, InvalidRequest(resp.text or resp.reason))
        return await super().finish_response(request, resp, start_time)

    def _refusal(self, status: int, error: PrfaasError) -> web.Response:
        answer = error_answer(error, status)
        headers = {**answer.headers, REQUEST_ID_HEADER: f"req-{self._ids.hex(12)}"}
        return web.Response(status=status, headers=headers, body=answer.body)


def _of_parser(status: int, exc: BaseException | None) -> tuple[int, PrfaasError]:
    if not isinstance(exc, HttpProcessingError):
        return status, PrfaasError("internal error")
    if isinstance(exc, LineTooLong):
        return 431, InvalidRequest("a line of the head is too long")
    if isinstance(exc, ContentEncodingError):
        return 415, InvalidRequest("Content-Encoding: only gzip and deflate are understood")
    if isinstance(exc, InvalidURLError):
        return status, InvalidRequest("the URL is not valid")
    # What follows the colon is the client's own bytes.
    reason = " ".join(exc.message.partition(":\n\n")[0].split())[:MAX_REASON_CHARS]
    return status, InvalidRequest(f"this is not HTTP/1.1: {reason}")
