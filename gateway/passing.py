"""The story of a request that is passed on: to an engine that has its endpoint, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import msgspec

from gateway.abilities import Abilities, Offer
from gateway.attempts import BROKEN_STATUSES, RETRIED_STATUSES, kind_in, note_answer, stream_headers
from gateway.engines import Engine, Engines
from gateway.event_relay import end_broken_events, relay_events
from gateway.ids import Ids
from gateway.keepalive import Keepalives, kept_alive
from gateway.metrics import GatewayMetrics
from gateway.model_card import check_model
from gateway.opening import open_record
from gateway.passed import PassedBody, PassedInbound
from gateway.records import RecordBook, RequestRecord
from gateway.relay import EVENT_STREAM, ClientSink, Relayed, WholeAnswer, relay_whole
from gateway.request_log import RequestLog
from gateway.request_spans import RequestSpans
from gateway.stages import UPSTREAM
from prfaas.clock import Clock
from prfaas.errors import (
    EngineUnavailable,
    NotFound,
    Overloaded,
    PrfaasError,
)
from prfaas.hashing import cache_salt
from prfaas.limits import Limits
from prfaas.settings import GatewaySettings

LACKING = frozenset({404, 405, 501})
"""Statuses by which a server says that it has no such endpoint, unless its error says more."""
LACKING_KINDS = frozenset({EngineUnavailable.kind, NotFound.kind})
"""Of such an answer: no error in OpenAI's shape, or one that says just that."""


class Passing:
    """Passes requests on. Owns log lines not written yet, and the timer of comments; close it with
    `close`, after the last request.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        limits: Limits,
        engines: Engines,
        abilities: Abilities,
        records: RecordBook,
        metrics: GatewayMetrics,
        ids: Ids,
        clock: Clock,
        spans: RequestSpans | None = None,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._engines = engines
        self._abilities = abilities
        self._records = records
        self._metrics = metrics
        self._ids = ids
        self._clock = clock
        self._cache_secret = settings.cache_secret.get_secret_value().encode()
        self._traced = spans is not None
        self._log = RequestLog(spans)
        self._keepalives = Keepalives(limits.sse_keepalive_s)

    def close(self) -> None:
        self._log.close()
        self._keepalives.close()

    async def serve(self, inbound: PassedInbound, sink: ClientSink) -> WholeAnswer | None:
        """Answer one request: a whole answer to send, or None where it was streamed to `sink`.

        Raises the PrfaasError to answer with; cancelling it (the client left) stops the engine.
        """
        record = open_record(self._records, inbound, self._ids, self._traced)
        answer: WholeAnswer | Relayed | None = None
        try:
            answer = await self._within_time(inbound, sink, record)
        except BaseException as exc:
            record.broke_off(exc)
            raise
        else:
            note_answer(record, answer)
            return answer if isinstance(answer, WholeAnswer) else None
        finally:
            record.committed = sink.started
            record.ended_at = self._clock.now()
            inbound.visit.over(record, answer)
            self._metrics.passed(record)
            self._log.add(record)

    async def _within_time(
        self, inbound: PassedInbound, sink: ClientSink, record: RequestRecord
    ) -> WholeAnswer | Relayed:
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                return await self._steps(inbound, sink, record)
        except TimeoutError as exc:
            text = f"not finished within {self._limits.request_timeout_s:g} s"
            error = EngineUnavailable(text, phase="total")
            if not sink.started:
                raise error from exc
            return await end_broken_events(sink, error)

    async def _steps(
        self, inbound: PassedInbound, sink: ClientSink, record: RequestRecord
    ) -> WholeAnswer | Relayed:
        body = PassedBody(inbound.api, inbound.body, len(self._engines))
        record.body_bytes, record.stream = body.body_bytes, body.stream
        check_model(body.model, self._settings.model)
        if body.strips:
            self._metrics.stripped.labels("kv_transfer_params").inc()
        await inbound.visit.admit(body.body_bytes, 0)
        salt = ""
        if inbound.api.salted:
            salt = cache_salt(
                self._cache_secret, inbound.visit.name, body.cache_salt or inbound.salt_header
            )
        sent = body.for_engine(salt)
        turns = self._engines.turns if inbound.api.salted else None
        if turns is None:
            return await self._taken(inbound, body, sent, sink, record)
        await turns.enter(lambda: record.started_at)
        try:
            return await self._taken(inbound, body, sent, sink, record)
        finally:
            turns.leave()

    async def _taken(
        self,
        inbound: PassedInbound,
        body: PassedBody,
        sent: bytes,
        sink: ClientSink,
        record: RequestRecord,
    ) -> WholeAnswer | Relayed:
        """It goes to an engine now."""
        if not body.stream:
            return await self._attempts(inbound, body, sent, sink, record)

        def answering(kept: ClientSink) -> Awaitable[WholeAnswer | Relayed]:
            return self._attempts(inbound, body, sent, kept, record)

        headers = stream_headers(record)
        return await kept_alive(
            sink, headers, self._keepalives, answering, _end_refused, end_broken_events
        )

    async def _attempts(
        self,
        inbound: PassedInbound,
        body: PassedBody,
        sent: bytes,
        sink: ClientSink,
        record: RequestRecord,
    ) -> WholeAnswer | Relayed:
        """An engine that has the endpoint, and another one where it fails before it answers."""
        lacking = await self._lacking(inbound)
        left = self._limits.engine_attempts
        failed: PrfaasError | WholeAnswer | None = None
        while left:
            chosen = self._engines.choose(
                {}, body.body_bytes // 4, record.key, {*lacking, *record.tried}
            )
            if chosen is None:
                break
            engine, _ = chosen
            if failed is not None:
                why = failed.kind if isinstance(failed, PrfaasError) else f"status_{failed.status}"
                self._metrics.engine_retries.labels(record.engine, why).inc()
            record.engine = engine.name
            record.tried.append(engine.name)
            record.begins(UPSTREAM, self._clock.now(), engine.name)
            self._engines.sent(engine, {})
            answer = await self._attempt(engine, inbound, sent, sink, record)
            if _says_that_it_lacks(answer):
                self._abilities.lacks(engine, inbound.api)
                lacking.add(engine.name)
                continue
            if isinstance(answer, Relayed):
                return answer
            if isinstance(answer, WholeAnswer) and answer.status not in RETRIED_STATUSES:
                return answer
            left -= 1
            failed = answer
        if isinstance(failed, PrfaasError):
            raise failed
        if failed is not None:
            return failed
        if not len(self._engines):
            raise EngineUnavailable("no decode engine is known")
        raise NotFound(f"no engine of this gateway has {inbound.api.path}")

    async def _lacking(self, inbound: PassedInbound) -> set[str]:
        """Engines without the endpoint. Those that are away are not asked."""
        headers = dict(inbound.passed_headers)
        engines = [engine for engine in self._engines if engine.probe.reachable]
        offers = await asyncio.gather(
            *(self._abilities.offer(engine, inbound.api, headers) for engine in engines)
        )
        return {
            engine.name for engine, offer in zip(engines, offers, strict=True) if offer is Offer.NO
        }

    async def _attempt(
        self,
        engine: Engine,
        inbound: PassedInbound,
        sent: bytes,
        sink: ClientSink,
        record: RequestRecord,
    ) -> WholeAnswer | Relayed | EngineUnavailable | Overloaded:
        """One engine's answer, or why it has none. Holds it against the engine where it is its."""
        headers = {
            **inbound.passed_headers,
            "content-type": "application/json",
            "x-request-id": inbound.request_id,
            "traceparent": inbound.trace.traceparent,
        }
        answer: WholeAnswer | Relayed
        try:
            with engine.serving:
                async with engine.upstream.post(inbound.api.path, headers, sent) as response:
                    kind = response.headers.get("content-type", "")
                    if response.status == 200 and kind.startswith(EVENT_STREAM):
                        shown = stream_headers(record, kind)
                        answer = await relay_events(
                            response, sink, self._limits, shown, record.completed
                        )
                    else:
                        answer = await relay_whole(response, self._limits)
        except EngineUnavailable as exc:
            self._engines.failed(engine)
            return exc
        except Overloaded as exc:
            self._engines.unjudged(engine)
            return exc
        except BaseException:
            self._engines.unjudged(engine)
            raise
        broken = isinstance(answer, Relayed) and answer.broken == EngineUnavailable.kind
        if broken or (isinstance(answer, WholeAnswer) and answer.status in BROKEN_STATUSES):
            self._engines.failed(engine)
        else:
            self._engines.succeeded(engine)
        return answer


def _says_that_it_lacks(answer: WholeAnswer | Relayed | PrfaasError) -> bool:
    if not isinstance(answer, WholeAnswer) or answer.status not in LACKING:
        return False
    return kind_in(answer.body) in LACKING_KINDS


async def _end_refused(sink: ClientSink, answer: WholeAnswer) -> Relayed:
    """Too late for a status of its own."""
    message = "and did not stream"
    if answer.status >= 400:  # in OpenAI's shape, which `relay_whole` sees to
        message = msgspec.json.decode(answer.body)["error"].get("message")
    error = EngineUnavailable(f"the engine answered {answer.status}: {message}")
    return await end_broken_events(sink, error)
