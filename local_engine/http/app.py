"""The aiohttp application of the embedded engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from local_engine.http.errors import echo_request_id, errors
from local_engine.http.handlers import Handlers
from local_engine.http.state import ServerState
from local_engine.http.tracing import tracing

if TYPE_CHECKING:
    from prfaas.tracing import Spans


def build_app(
    state: ServerState, *, debug_endpoints: bool = False, spans: Spans | None = None
) -> web.Application:
    """All routes over `state`, which the caller closes.

    Run it with `handler_cancellation=True`: a client that goes away cancels its request.
    """
    app = web.Application(client_max_size=state.limits.max_body_bytes, middlewares=[errors])
    if spans is not None:
        app.middlewares.insert(0, tracing(spans))
    app.on_response_prepare.append(echo_request_id)
    handlers = Handlers(state)
    app.router.add_post("/v1/chat/completions", handlers.chat)
    app.router.add_post("/v1/completions", handlers.completion)
    app.router.add_get("/v1/models", handlers.models)
    app.router.add_get("/v1/models/{model:.+}", handlers.model)
    app.router.add_post("/tokenize", handlers.tokenize)
    app.router.add_post("/detokenize", handlers.detokenize)
    app.router.add_get("/health", handlers.health)
    app.router.add_get("/ready", handlers.ready)
    app.router.add_get("/metrics", handlers.metrics)
    if debug_endpoints:
        app.router.add_get("/debug/integrity", handlers.integrity)
        app.router.add_post("/debug/reset_prefix_cache", handlers.reset_prefix_cache)
    return app
