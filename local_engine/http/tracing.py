"""The engine's span of each request that came with a trace."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from prfaas.trace_context import parse_traceparent

if TYPE_CHECKING:
    from prfaas.tracing import Spans


def tracing(spans: Spans) -> Middleware:
    """A middleware; it borrows the exporter."""

    @web.middleware
    async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
        parent = parse_traceparent(request.headers.get("traceparent", ""))
        if parent is None:
            return await handler(request)
        start_s, status, error = time.time(), 499, "cancelled"
        try:
            response = await handler(request)
            status, error = response.status, ""
            return response
        finally:
            spans.add(
                f"POST {request.path}",
                "server",
                parent.child(),
                parent.span_id,
                start_s,
                time.time(),
                {
                    "http.response.status_code": status,
                    "prfaas.request_id": request.headers.get("x-request-id", ""),
                },
                error=error or (f"status {status}" if status >= 500 else ""),
            )

    return trace
