"""HTTP routes: aiohttp's types stop here, and every error leaves in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from gateway.admission import Admission, FallbackBudget
from gateway.answers import REQUEST_ID_HEADER, error_answer
from gateway.client_head import PASSED_HEADERS, request_id_of
from gateway.cluster_view import ClusterView, describe
from gateway.engines import Engines
from gateway.generation import Generation
from gateway.ids import Ids
from gateway.job import Inbound
from gateway.metrics import GatewayMetrics
from gateway.quality import QUALITY_HEADER
from gateway.records import RecordBook, detail, summary
from gateway.relay import WholeAnswer
from gateway.schema import Api
from gateway.trace import trace_of
from prfaas.errors import (
    BodyTooLarge,
    Cancelled,
    InvalidRequest,
    NotFound,
    Overloaded,
    PrfaasError,
)
from prfaas.limits import Limits

logger = logging.getLogger(__name__)

MAX_LISTED = 1000
UNWAITED_BYTES = 16 << 10
"""What a client's empty send buffer takes without anyone having to wait for it."""

_REQUEST_ID_KEY = web.RequestKey("request_id", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Handlers:
    """The routes of one gateway; owns nothing."""

    def __init__(
        self,
        model: str,
        limits: Limits,
        generation: Generation,
        admission: Admission,
        budget: FallbackBudget,
        view: ClusterView,
        engines: Engines,
        records: RecordBook,
        metrics: GatewayMetrics,
        ids: Ids,
    ) -> None:
        self._model = model
        self._limits = limits
        self._generation = generation
        self._admission = admission
        self._budget = budget
        self._view = view
        self._engines = engines
        self._records = records
        self._metrics = metrics
        self._ids = ids
        self._created = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._limits.max_body_bytes, middlewares=[self._errors]
        )
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/prfaas/requests", self._requests)
        app.router.add_get("/prfaas/requests/{request_id}", self._request)
        app.router.add_get("/prfaas/cluster", self._cluster)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Api.CHAT)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Api.COMPLETIONS)

    async def _generate(self, request: web.Request, api: Api) -> web.StreamResponse:
        try:
            self._admission.enter()
        except Overloaded:
            self._metrics.refused.labels("draining" if self._admission.draining else "full").inc()
            raise
        try:
            return await self._admitted(request, api)
        finally:
            self._admission.leave()

    async def _admitted(self, request: web.Request, api: Api) -> web.StreamResponse:
        request_id = self._request_id(request)
        sink = _ResponseSink(request, request_id, self._limits.slow_client_timeout_s)
        inbound = Inbound(
            request_id=request_id,
            api=api,
            trace=trace_of(request.headers.get("traceparent"), self._ids),
            body=await self._body(request),
            salt_header=request.headers.get("x-cache-salt", ""),
            quality_header=request.headers.get(QUALITY_HEADER, ""),
            passed_headers=_passed_headers(request),
        )
        try:
            answer = await self._generation.serve(inbound, sink)
        except BaseException:
            if sink.started:  # too late for a status: a cut connection is the honest end
                sink.abort()
            raise
        return sink.response if answer is None else _whole(answer, request_id)

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._limits.slow_client_timeout_s):
                return await request.read()
        except TimeoutError as exc:
            raise InvalidRequest("the body did not arrive in time") from exc
        except (ConnectionError, web.RequestPayloadError) as exc:
            raise InvalidRequest("the body broke off") from exc

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._model, "object": "model", "created": self._created, "owned_by": "prfaas"
        }  # fmt: skip
        return _json({"object": "list", "data": [card]})

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        if self._admission.draining:
            return _json({"status": "draining"}, 503)
        if not self._engines.reachable:
            return _json({"status": "no engine is reachable"}, 503)
        return _json({"status": "ready"})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.render(),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _requests(self, request: web.Request) -> web.Response:
        text = request.query.get("limit", "50")
        if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_LISTED:
            raise InvalidRequest(f"limit: from 1 to {MAX_LISTED}, not {text[:20]!r}", param="limit")
        latest = self._records.latest(int(text))
        return _json({"requests": [summary(record) for record in latest]})

    async def _request(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        record = self._records.get(request_id)
        if record is None:
            raise NotFound(f"no request {request_id[:128]!r} is remembered")
        return _json(detail(record))

    async def _cluster(self, request: web.Request) -> web.Response:
        return _json(describe(self._view, self._budget.free_tokens))

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as exc:
            error, headers = _of_http(exc, request)
            answer = error_answer(error, exc.status)
            answer.headers.update(headers)
        except PrfaasError as exc:
            answer = error_answer(exc)
        except Exception:
            logger.exception("internal error at %s", request.path)
            answer = error_answer(PrfaasError("internal error"), 500)
        return _whole(answer, self._request_id(request))

    def _request_id(self, request: web.Request) -> str:
        """The same however often it is asked for."""
        known = request.get(_REQUEST_ID_KEY)
        if known is None:
            known = request_id_of(request.headers.get(REQUEST_ID_HEADER, ""), self._ids)
            request[_REQUEST_ID_KEY] = known
        return known


class _ResponseSink:
    """The client's side of one streamed answer."""

    def __init__(self, request: web.Request, request_id: str, timeout_s: float) -> None:
        self._request = request
        self._request_id = request_id
        self._timeout_s = timeout_s
        self._late = b""
        self.response = web.StreamResponse()

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def start(self, headers: Mapping[str, str]) -> None:
        self.response.headers.update(headers)
        self.response.headers[REQUEST_ID_HEADER] = self._request_id
        self.response.headers["cache-control"] = "no-cache"
        self.response.headers["x-accel-buffering"] = "no"
        try:
            await self.response.prepare(self._request)
        except ConnectionError as exc:
            raise Cancelled("the client went away") from exc

    def put(self, data: bytes) -> bool:
        self._late += data  # aiohttp writes in coroutines only
        return True

    async def drain(self) -> None:
        data, self._late = self._late, b""
        transport = self._request.transport
        if (
            transport is not None
            and len(data) <= UNWAITED_BYTES
            and not transport.get_write_buffer_size()
        ):
            try:
                await self.response.write(data)  # never waits, so it needs no deadline
            except ConnectionError as exc:
                raise Cancelled("the client went away") from exc
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.write(data)
        except TimeoutError as exc:
            self.abort()
            raise Cancelled(f"the client read nothing for {self._timeout_s:g} s") from exc
        except ConnectionError as exc:
            raise Cancelled("the client went away") from exc

    async def end(self, complete: bool) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.write_eof()
        except (TimeoutError, ConnectionError) as exc:
            self.abort()
            raise Cancelled("the client went away") from exc
        if not complete and self._request.transport is not None:
            self._request.transport.close()

    def abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


def _passed_headers(request: web.Request) -> dict[str, str]:
    """Raises InvalidRequest for one that is no text, which could not go on as it came."""
    passed: dict[str, str] = {}
    for name in PASSED_HEADERS:
        value = request.headers.get(name)
        if value is None:
            continue
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(f"header {name} is not UTF-8", param=name) from exc
        passed[name] = value
    return passed


def _of_http(exc: web.HTTPException, request: web.Request) -> tuple[PrfaasError, dict[str, str]]:
    """aiohttp's own refusals as ours, with the headers that belong to them."""
    if isinstance(exc, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge(f"the body is larger than the limit: {exc.text}"), {}
    if isinstance(exc, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(exc.allowed_methods))
        text = f"{request.path} takes {allowed}, not {request.method}"
        return InvalidRequest(text), {"allow": allowed}
    if exc.status == 404:
        return NotFound(f"there is no {request.path[:200]}"), {}
    if exc.status < 500:
        return InvalidRequest(exc.reason), {}
    return PrfaasError(exc.reason), {}


def _whole(answer: WholeAnswer, request_id: str) -> web.Response:
    headers = {**answer.headers, REQUEST_ID_HEADER: request_id}
    return web.Response(status=answer.status, headers=headers, body=answer.body)


def _json(data: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(data), content_type="application/json"
    )
