"""HTTP routes: aiohttp's types stop here, and every error leaves in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web

from gateway import openapi
from gateway.admission import Admission, FallbackBudget
from gateway.answers import REQUEST_ID_HEADER, error_answer
from gateway.client_head import PASSED_HEADERS, request_id_of
from gateway.cluster_view import ClusterView, describe
from gateway.engines import Engines
from gateway.events import Channel, Gaps
from gateway.generation import Generation
from gateway.ids import Ids
from gateway.job import Inbound
from gateway.metrics import GatewayMetrics
from gateway.model_card import ModelCard, check_model
from gateway.passed import PassedApi, PassedInbound
from gateway.passing import Passing
from gateway.quality import QUALITY_HEADER
from gateway.records import RecordBook, detail, summary
from gateway.relay import ClientSink, WholeAnswer
from gateway.schema import Api
from gateway.tenancy.door import ANYBODY, Door, Visit
from gateway.trace import trace_of
from gateway.workers.everyone import Everyone
from prfaas.errors import (
    BodyTooLarge,
    Cancelled,
    InvalidRequest,
    NotFound,
    Overloaded,
    PrfaasError,
    Unauthorized,
)
from prfaas.limits import Limits

logger = logging.getLogger(__name__)

MAX_LISTED = 1000
CONTINUE = "100-continue"
ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})
"""Of bodies, that aiohttp undoes."""
_LIMIT = re.compile(r"[0-9]{1,9}")
UNWAITED_BYTES = 16 << 10
"""What a client's empty send buffer takes without anyone having to wait for it."""

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", openapi.PATH})
"""For probes, Prometheus and whoever looks for the API, who bring no key."""
GENERATING_PATHS = frozenset({*(api.path for api in Api), *(api.path for api in PassedApi)})
BROWSERS_ASK = 'Basic realm="prfaas: any name, an admin key as the password"'

_REQUEST_ID_KEY = web.RequestKey("request_id", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Handlers:
    """The routes of one gateway; owns nothing."""

    def __init__(
        self,
        model: str,
        limits: Limits,
        generation: Generation,
        passing: Passing,
        admission: Admission,
        budget: FallbackBudget,
        view: ClusterView,
        engines: Engines,
        records: RecordBook,
        metrics: GatewayMetrics,
        ids: Ids,
        door: Door | None = None,
        everyone: Everyone | None = None,
    ) -> None:
        """`everyone`: the other workers, for whom this one answers too."""
        self._everyone = everyone
        self._model = model
        self._limits = limits
        self._generation = generation
        self._passing = passing
        self._admission = admission
        self._budget = budget
        self._view = view
        self._engines = engines
        self._records = records
        self._metrics = metrics
        self._ids = ids
        self._door = door
        self._models_page = ModelCard(model, engines, limits)

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._limits.max_body_bytes, middlewares=[self._errors]
        )
        post = partial(app.router.add_post, expect_handler=_not_yet)
        post("/v1/chat/completions", self._chat)
        post("/v1/completions", self._completions)
        for api in PassedApi:
            post(api.path, partial(self._passed, api))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._one_model)
        app.router.add_get(openapi.PATH, self._openapi)
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
        with self._place(request, api.value) as visit:
            return await self._admitted(request, api, visit)

    async def _passed(self, api: PassedApi, request: web.Request) -> web.StreamResponse:
        with self._place(request, api.value) as visit:
            inbound = PassedInbound(
                request_id=self._request_id(request),
                api=api,
                trace=trace_of(request.headers.get("traceparent"), self._ids),
                body=await self._body(request),
                salt_header=request.headers.get("x-cache-salt", ""),
                passed_headers=visit.passed_headers(_passed_headers(request)),
                visit=visit,
            )
            return await self._answered(request, lambda sink: self._passing.serve(inbound, sink))

    @contextmanager
    def _place(self, request: web.Request, api: str) -> Iterator[Visit]:
        """A place among the requests in flight. Raises Overloaded, counted, and what the door says
        of its key and its tenant's limits.
        """
        try:
            self._admission.enter()
        except Overloaded:
            self._metrics.refused.labels("draining" if self._admission.draining else "full").inc()
            raise
        visit = ANYBODY
        try:
            if self._door is not None:
                visit = self._door.enter(_authorization(request))
            if visit.refusal is not None:
                trace = trace_of(request.headers.get("traceparent"), self._ids)
                visit.refused(self._request_id(request), trace.trace_id, api)
                raise visit.refusal
            yield visit
        finally:
            visit.leave()
            self._admission.leave()

    async def _admitted(self, request: web.Request, api: Api, visit: Visit) -> web.StreamResponse:
        inbound = Inbound(
            request_id=self._request_id(request),
            api=api,
            trace=trace_of(request.headers.get("traceparent"), self._ids),
            body=await self._body(request),
            salt_header=request.headers.get("x-cache-salt", ""),
            quality_header=request.headers.get(QUALITY_HEADER, ""),
            passed_headers=visit.passed_headers(_passed_headers(request)),
            visit=visit,
        )
        return await self._answered(request, lambda sink: self._generation.serve(inbound, sink))

    async def _answered(
        self,
        request: web.Request,
        serve: Callable[[ClientSink], Awaitable[WholeAnswer | None]],
    ) -> web.StreamResponse:
        request_id = self._request_id(request)
        sink = _ResponseSink(request, request_id, self._limits.slow_client_timeout_s)
        try:
            answer = await serve(sink)
        except BaseException:
            if sink.started:  # too late for a status: a cut connection is the honest end
                sink.abort()
            raise
        return sink.response if answer is None else _whole(answer, request_id)

    async def _body(self, request: web.Request) -> bytes:
        if request.version == HttpVersion11 and request.headers.get("expect"):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer has not begun
        try:
            async with asyncio.timeout(self._limits.slow_client_timeout_s):
                return await request.read()
        except TimeoutError as exc:
            raise InvalidRequest("the body did not arrive in time") from exc
        except (ConnectionError, web.RequestPayloadError) as exc:
            raise InvalidRequest("the body broke off, or is not as its headers say") from exc

    async def _models(self, request: web.Request) -> web.Response:
        card = await self._models_page.card(self._shown_headers(request))
        return _json({"object": "list", "data": [card]})

    async def _one_model(self, request: web.Request) -> web.Response:
        check_model(request.match_info["model"], self._model)
        return _json(await self._models_page.card(self._shown_headers(request)))

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=openapi.document(), content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        if self._admission.draining:
            return _json({"status": "draining"}, 503)
        if not self._engines.reachable:
            return _json({"status": "no engine is reachable"}, 503)
        return _json({"status": "ready"})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        everyone = self._everyone
        return web.Response(
            body=self._metrics.render() if everyone is None else await everyone.metrics(),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _requests(self, request: web.Request) -> web.Response:
        text = request.query.get("limit", "50")
        if not _LIMIT.fullmatch(text) or not 1 <= int(text) <= MAX_LISTED:
            raise InvalidRequest(f"limit: from 1 to {MAX_LISTED}, not {text[:20]!r}", param="limit")
        if self._everyone is not None:
            return _json({"requests": await self._everyone.requests(int(text))})
        latest = self._records.latest(int(text))
        return _json({"requests": [summary(record) for record in latest]})

    async def _request(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        if self._everyone is not None:
            told = await self._everyone.request(request_id)
            if told is not None:
                return web.Response(body=bytes(told), content_type="application/json")
        record = self._records.get(request_id)
        if record is None:
            raise NotFound(f"no request {request_id[:128]!r} is remembered")
        return _json(detail(record))

    async def _cluster(self, request: web.Request) -> web.Response:
        if self._everyone is not None:
            return _json(await self._everyone.cluster())
        return _json(describe(self._view, self._budget.free_tokens))

    def _shown_headers(self, request: web.Request) -> dict[str, str]:
        """Of a request without a visit: the key of a tenant is for nobody but the gateway."""
        headers = _passed_headers(request)
        if self._door is not None:
            headers.pop("authorization", None)
        return headers

    def _guard(self, request: web.Request) -> None:
        """Who may read what; requests for engines have a door of their own. Raises Unauthorized and
        Forbidden.
        """
        path = request.path
        if self._door is None or path in OPEN_PATHS:
            return
        if path in GENERATING_PATHS:
            if request.method != "POST":
                self._door.check(_authorization(request))
        elif path.startswith("/v1/"):
            self._door.check(_authorization(request))
        else:
            self._door.check_admin(_authorization(request))

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _check_head(request, self._limits.max_body_bytes)
            self._guard(request)
            return await handler(request)
        except web.HTTPException as exc:
            error, headers = _of_http(exc, request)
            answer = error_answer(error, exc.status)
            answer.headers.update(headers)
        except PrfaasError as exc:
            answer = error_answer(exc)
            if isinstance(exc, Unauthorized) and not request.path.startswith("/v1/"):
                answer.headers["www-authenticate"] = BROWSERS_ASK
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

    def put(self, data: bytes, last: bool = False) -> bool:
        self._late += data  # aiohttp writes in coroutines only
        return True

    def channel(self, gaps: Gaps) -> Channel | None:
        return None

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


def _authorization(request: web.Request) -> str:
    return request.headers.get("authorization", "")


async def _not_yet(request: web.Request) -> None:
    """A body is asked for when it is to be read, and not where the request is refused."""


def _check_head(request: web.Request, max_body_bytes: int) -> None:
    """What is HTTP, but not for us. Raises InvalidRequest, BodyTooLarge and aiohttp's refusals."""
    if request.version not in (HttpVersion10, HttpVersion11):
        raise web.HTTPVersionNotSupported
    headers = request.headers
    if (headers.get("expect") or CONTINUE).lower() != CONTINUE:
        raise web.HTTPExpectationFailed
    if headers.get("content-encoding", "identity").lower() not in ENCODINGS:
        raise web.HTTPUnsupportedMediaType(reason="Content-Encoding: only gzip and deflate")
    length = request.content_length
    if length is not None and length > max_body_bytes:
        raise BodyTooLarge(f"the body has {length} bytes, more than the limit of {max_body_bytes}")


def _passed_headers(request: web.Request) -> dict[str, str]:
    """Raises InvalidRequest for one that is no text, which could not go on as it came."""
    passed: dict[str, str] = {}
    hops = ",".join(request.headers.getall("connection", ())).lower().replace(" ", "").split(",")
    for name in PASSED_HEADERS:
        value = request.headers.get(name)
        if value is None or name in hops:
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
    if exc.status < 500 or isinstance(exc, web.HTTPVersionNotSupported):
        return InvalidRequest(exc.reason), {}
    return PrfaasError(exc.reason), {}


def _whole(answer: WholeAnswer, request_id: str) -> web.Response:
    headers = {**answer.headers, REQUEST_ID_HEADER: request_id}
    return web.Response(status=answer.status, headers=headers, body=answer.body)


def _json(data: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(data), content_type="application/json"
    )
