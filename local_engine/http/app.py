"""The aiohttp application of the embedded engine."""

from __future__ import annotations

from aiohttp import web

from local_engine.http.errors import echo_request_id, errors
from local_engine.http.handlers import Handlers
from local_engine.http.state import ServerState


def build_app(state: ServerState, *, debug_endpoints: bool = False) -> web.Application:
    """All routes over `state`, which the caller closes.

    Run it with `handler_cancellation=True`: a client that goes away cancels its request.
    """
    app = web.Application(client_max_size=state.limits.max_body_bytes, middlewares=[errors])
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
