"""The story of one request, from the client's bytes to the last event, in eight steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from functools import partial
from typing import Any

import msgspec

from gateway.admission import FallbackBudget
from gateway.attempts import Attempts, answer_headers, note_answer, stream_headers
from gateway.cluster_view import ClusterView
from gateway.deadlines import Deadlines
from gateway.dispatch import Dispatcher
from gateway.engines import Engines
from gateway.ids import Ids
from gateway.job import Inbound, Job
from gateway.keepalive import Keepalives, kept_alive
from gateway.live_policy import LivePolicy
from gateway.metrics import GatewayMetrics
from gateway.model_card import check_model
from gateway.opening import open_record
from gateway.outcomes import Outcomes
from gateway.quality import salt_of
from gateway.queue_order import QueueOrder
from gateway.records import RecordBook, RequestRecord
from gateway.relay import ClientSink, Relayed, WholeAnswer, end_broken, end_refused
from gateway.request_spans import RequestSpans
from gateway.schema import ParsedRequest, parse
from gateway.stages import ROOM, TOKENISE
from gateway.tokenise import Prompt, Tokeniser, guess
from gateway.tokenizer_check import TokenizerCheck
from prfaas.clock import Clock
from prfaas.errors import EngineUnavailable
from prfaas.hashing import cache_salt
from prfaas.limits import Limits
from prfaas.settings import GatewaySettings
from prfaas.snapshot import Outcome

PREFIX_BLOCKS = frozenset({64})
"""Block size by which prompts are compared where no engine has told one."""


class Generation:
    """Serves chat and completions. Owns the deadlines of requests and what waits for outcomes;
    close it with `close`, after the last request."""

    def __init__(
        self,
        settings: GatewaySettings,
        limits: Limits,
        policy: LivePolicy,
        view: ClusterView,
        tokeniser: Tokeniser,
        tokenizer_check: TokenizerCheck,
        engines: Engines,
        records: RecordBook,
        metrics: GatewayMetrics,
        budget: FallbackBudget,
        ids: Ids,
        clock: Clock,
        spans: RequestSpans | None = None,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._view = view
        self._tokeniser = tokeniser
        self._tokenizer_check = tokenizer_check
        self._records = records
        self._metrics = metrics
        self._ids = ids
        self._clock = clock
        self._deadlines = Deadlines(limits.request_timeout_s)
        self._keepalives = Keepalives(limits.sse_keepalive_s)
        self._turns = engines.turns
        self._order = QueueOrder(settings.queue, policy, view)
        self._dispatcher = Dispatcher(settings, limits, view, budget, clock)
        self._traced = spans is not None
        self.outcomes = Outcomes(limits, policy, view, self._dispatcher, metrics, spans)
        self._attempts = Attempts(
            settings,
            limits,
            policy,
            view,
            engines,
            self._dispatcher,
            self.outcomes,
            metrics,
            budget,
            ids,
            clock,
        )
        self._cache_secret = settings.cache_secret.get_secret_value().encode()
        self._engines = engines

    def _needs_tokens(self) -> bool:
        """Something depends on what a prompt is: which engine, or whether it leaves D."""
        return len(self._engines) > 1 or (self._settings.offload and self._view.has_agents)

    async def serve(self, inbound: Inbound, sink: ClientSink) -> WholeAnswer | None:
        """Answer one request: a whole answer to send, or None where it was streamed to `sink` or
        said.

        Raises the PrfaasError to answer with; cancelling it (the client left) stops the engine.
        """
        record = open_record(self._records, inbound, self._ids, self._traced)
        answer: WholeAnswer | Relayed | None = None
        task = inbound.task or asyncio.current_task()
        assert task is not None
        self._deadlines.begin(task)
        try:
            answer = await self._steps(inbound, sink, record)
        except BaseException as exc:
            if not isinstance(exc, asyncio.CancelledError) or not self._deadlines.expired(task):
                record.broke_off(exc)
                raise
            error = EngineUnavailable(
                f"not finished within {self._limits.request_timeout_s:g} s", phase="total"
            )
            if not sink.started:
                record.fail(error)
                raise error from None
            note_answer(record, await end_broken(sink, error))
            return None
        else:
            note_answer(record, answer)
            if isinstance(answer, Relayed) or answer.said:
                return None
            answer.headers.update(answer_headers(record))
            return answer
        finally:
            self._deadlines.end(task)
            record.committed = sink.started
            inbound.visit.over(record, answer)
            self._end(record)

    async def _steps(
        self, inbound: Inbound, sink: ClientSink, record: RequestRecord
    ) -> WholeAnswer | Relayed:
        # 1. Parse and validate what we act on; the engine judges the rest.
        short = len(inbound.body) <= self._settings.short_body_bytes
        stays = short or not self._needs_tokens()
        whole = not stays and self._tokeniser.reads(len(inbound.body))
        parsed = parse(inbound.api, inbound.body, whole)
        check_model(parsed.model, self._settings.model)
        record.body_bytes, record.stream = parsed.body_bytes, parsed.stream
        visit = inbound.visit
        quality = visit.quality(inbound.quality_header, self._settings)
        record.kv_quality = quality
        await visit.admit(parsed.body_bytes, parsed.max_tokens)
        salt = cache_salt(self._cache_secret, visit.name, parsed.cache_salt or inbound.salt_header)
        salt = salt_of(salt, quality)

        # 2. Template, tokenise and hash, unless nothing could make it leave D.
        if stays or parsed.features:
            prompt = guess(parsed)
        else:
            record.begins(TOKENISE, self._clock.now())
            prompt = await self._prompt(parsed, salt)

        if not prompt.chains and not short and len(self._engines) > 1:
            prompt = msgspec.structs.replace(prompt, texts=self._engines.texts(parsed.body, salt))

        # 3. to 7. in `Attempts`, for one engine after the other.
        job = Job(inbound, parsed, prompt, salt, sink, record, short)
        taken = self._streamed if parsed.stream else self._attempts.run
        if self._turns is None:
            return await taken(job)
        await self._turns.enter(partial(self._place, job))
        try:
            return await taken(job)
        finally:
            self._turns.leave()
        # 8. One log line for each request, with its outcome: see `_end`.

    def _place(self, job: Job) -> float:
        """Of a request that has to wait, among others that do."""
        job.record.begins(ROOM, self._clock.now())
        return self._order.key(job)

    def _streamed(self, job: Job) -> Coroutine[Any, Any, WholeAnswer | Relayed]:
        """It goes to an engine now, and its client hears something now and then."""

        def answering(kept: ClientSink) -> Awaitable[WholeAnswer | Relayed]:
            job.sink = kept
            return self._attempts.run(job)

        headers = stream_headers(job.record)
        return kept_alive(job.sink, headers, self._keepalives, answering, end_refused, end_broken)

    def outcome(self, outcome: Outcome) -> None:
        """What D's agent reports of a transfer."""
        self.outcomes.came(outcome)

    def close(self) -> None:
        """Log what still waits for its outcome."""
        self._attempts.close()
        self.outcomes.close()
        self._deadlines.close()
        self._keepalives.close()

    async def _prompt(self, parsed: ParsedRequest, salt: str) -> Prompt:
        sizes = self._view.block_sizes() or PREFIX_BLOCKS
        prompt = await self._tokeniser.prompt(parsed, sizes, salt)
        if prompt.tokenised:
            self._tokenizer_check.saw(parsed)
        return prompt

    def _end(self, record: RequestRecord) -> None:
        record.ended_at = self._clock.now()
        self._dispatcher.prefill_over(record)
        self._metrics.finished(record)
        self.outcomes.ended(record)
