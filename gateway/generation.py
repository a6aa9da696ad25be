"""The story of one request, from the client's bytes to the last event, in eight steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import msgspec

from gateway.admission import FallbackBudget
from gateway.cluster_view import ClusterView
from gateway.deadlines import Deadlines
from gateway.dispatch import Dispatcher
from gateway.engines import Engine, Engines
from gateway.ids import Ids
from gateway.keepalive import KeepaliveSink
from gateway.live_policy import LivePolicy
from gateway.metrics import GatewayMetrics
from gateway.quality import quality_of, salt_of
from gateway.records import RecordBook, RequestRecord
from gateway.relay import (
    EVENT_STREAM,
    ClientSink,
    Relayed,
    WholeAnswer,
    end_broken,
    end_refused,
    relay_stream,
    relay_whole,
)
from gateway.request_log import RequestLog
from gateway.schema import Api, ParsedRequest, parse, rewrite
from gateway.tokenise import Prompt, Tokeniser, guess
from gateway.tokenizer_check import TokenizerCheck
from gateway.trace import Trace
from prfaas import transfer
from prfaas.clock import Clock
from prfaas.errors import (
    BY_KIND,
    Cancelled,
    EngineUnavailable,
    Overloaded,
    PrefillUnavailable,
    PrfaasError,
    UnknownModel,
)
from prfaas.hashing import cache_salt
from prfaas.limits import Limits
from prfaas.settings import GatewaySettings
from prfaas.snapshot import Decision, Outcome, Reason, RequestFacts, Target

logger = logging.getLogger(__name__)

TARGET_HEADER = "x-prfaas-target"
KV_FAILED = frozenset({"refused", "failed"})
"""Outcomes after which an engine has no KV to answer from, and was told not to compute it."""
RETRY_AFTER_S = 1.0
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
"""Answers that say that this engine cannot now: another one may."""
BROKEN_STATUSES = frozenset({500, 502, 504})
"""Answers that count against the engine; 429 and 503 are honest."""
PREFIX_BLOCKS = frozenset({64})
"""Block size by which prompts are compared where no engine has told one."""


class Inbound(msgspec.Struct, frozen=True):
    """One client request, off the wire. `passed_headers` go on to the engine as they are."""

    request_id: str
    api: Api
    trace: Trace
    body: bytes
    salt_header: str = ""
    quality_header: str = ""
    passed_headers: Mapping[str, str] = {}


class Generation:
    """Serves chat and completions. Owns the timers of late outcomes;
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
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._policy = policy
        self._view = view
        self._tokeniser = tokeniser
        self._tokenizer_check = tokenizer_check
        self._engines = engines
        self._records = records
        self._metrics = metrics
        self._budget = budget
        self._ids = ids
        self._clock = clock
        self._log = RequestLog()
        self._deadlines = Deadlines(limits.request_timeout_s)
        self._dispatcher = Dispatcher(settings, limits, view, budget, clock)
        self._cache_secret = settings.cache_secret.get_secret_value().encode()
        self._needs_tokens = len(engines) > 1 or (
            settings.offload and settings.engines[0].agent is not None
        )
        self._awaiting: dict[str, RequestRecord] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._waiters: dict[str, asyncio.Event] = {}

    async def serve(self, inbound: Inbound, sink: ClientSink) -> WholeAnswer | None:
        """Answer one request: a whole answer to send, or None where it was streamed to `sink`.

        Raises the PrfaasError to answer with; cancelling it (the client left) stops the engine.
        """
        record = self._records.open(
            inbound.request_id, inbound.api.value, inbound.trace.trace_id, self._ids.hex(16)
        )
        task = asyncio.current_task()
        assert task is not None
        self._deadlines.begin(task)
        try:
            answer = await self._steps(inbound, sink, record)
        except asyncio.CancelledError:
            if not self._deadlines.expired(task):
                record.fail(Cancelled("the client went away"))
                raise
            error = EngineUnavailable(
                f"not finished within {self._limits.request_timeout_s:g} s", phase="total"
            )
            if not sink.started:
                record.fail(error)
                raise error from None
            self._note(record, await end_broken(sink, error))
            return None
        except PrfaasError as exc:
            record.fail(exc)
            raise
        except BaseException:
            record.fail(PrfaasError("internal error"))
            raise
        else:
            self._note(record, answer)
            if isinstance(answer, Relayed):
                return None
            answer.headers.update(_answer_headers(record))
            return answer
        finally:
            self._deadlines.end(task)
            record.committed = sink.started
            self._end(record)

    async def _steps(
        self, inbound: Inbound, sink: ClientSink, record: RequestRecord
    ) -> WholeAnswer | Relayed:
        # 1. Parse and validate what we act on; the engine judges the rest.
        parsed = parse(inbound.api, inbound.body)
        self._check_model(parsed)
        record.body_bytes, record.stream = parsed.body_bytes, parsed.stream
        tenant = ""  # this version tells no clients apart
        quality = quality_of(inbound.quality_header, self._settings)
        record.kv_quality = quality
        salt = cache_salt(self._cache_secret, tenant, parsed.cache_salt or inbound.salt_header)
        salt = salt_of(salt, quality)

        # 2. Template, tokenise and hash, unless it cannot be worth it.
        prompt = guess(parsed) if self._stays(parsed) else await self._prompt(parsed, salt)

        if not parsed.stream:
            return await self._attempts(inbound, parsed, prompt, salt, sink, record)
        kept = KeepaliveSink(sink, _stream_headers(record), self._limits.sse_keepalive_s)
        try:
            answer = await self._attempts(inbound, parsed, prompt, salt, kept, record)
            if isinstance(answer, WholeAnswer) and sink.started:
                return await end_refused(kept, answer)
            return answer
        except PrfaasError as exc:
            if isinstance(exc, Cancelled) or not sink.started:
                raise
            return await end_broken(kept, exc)
        finally:
            await kept.close()
        # 8. One log line for each request, with its outcome: see `_end`.

    async def _attempts(
        self,
        inbound: Inbound,
        parsed: ParsedRequest,
        prompt: Prompt,
        salt: str,
        sink: ClientSink,
        record: RequestRecord,
    ) -> WholeAnswer | Relayed:
        """The best engine, and while nothing of an answer has come, another one where it fails."""
        most = min(self._limits.engine_attempts, len(self._engines))
        while True:
            engine = self._engines.choose(prompt.chains, prompt.tokens, record.key, record.tried)
            assert engine is not None
            record.engine = engine.name
            record.tried.append(engine.name)
            record.recent_tokens = self._engines.sent(engine, prompt.chains)
            last = len(record.tried) >= most
            try:
                with engine.serving():
                    answer = await self._attempt(
                        engine, inbound, parsed, prompt, salt, sink, record
                    )
            except EngineUnavailable as exc:
                self._engines.failed(engine)
                if last or record.first_event_at is not None:
                    raise
                why = exc.kind
            except Overloaded as exc:
                self._engines.unjudged(engine)
                if last:
                    raise
                why = exc.kind
            except BaseException:
                self._engines.unjudged(engine)
                raise
            else:
                status = answer.status if isinstance(answer, WholeAnswer) else 200
                broken = answer.broken if isinstance(answer, Relayed) else ""
                if status in BROKEN_STATUSES or broken == EngineUnavailable.kind:
                    self._engines.failed(engine)
                else:
                    self._engines.succeeded(engine)
                if last or status not in RETRIED_STATUSES:
                    return answer
                why = f"status_{status}"
            logger.info("%s: %s failed (%s), trying another", record.request_id, engine.name, why)
            self._metrics.engine_retries.labels(engine.name, why).inc()
            self._forget_attempt(record)

    async def _attempt(
        self,
        engine: Engine,
        inbound: Inbound,
        parsed: ParsedRequest,
        prompt: Prompt,
        salt: str,
        sink: ClientSink,
        record: RequestRecord,
    ) -> WholeAnswer | Relayed:
        # 3. What is known of every place, as of now.
        record.facts = self._facts(record, parsed, prompt, engine.name)
        record.snapshot = self._view.snapshot(engine.name, prompt.chains, self._budget.free_tokens)

        # 4. Decide.
        client_params = self._client_params(parsed)
        record.decision = self._decide(record, client_params)

        # 5. Sign the plan into the body and send it to the engine.
        if client_params is not None:
            self._dispatcher.relayed(record, client_params)
            body = inbound.body
        else:
            params = self._dispatcher.dispatch(record, salt)
            body = rewrite(parsed, params.to_dict() if params else None, salt or None)
        self._note_dispatch(record)
        # 6. D's agent carries out the plan; `outcome` hears how it went.
        # 7. Nothing goes to the client before the engine's first event; then all of it does.
        return await self._relay(engine, inbound, parsed, body, sink, record)

    def _forget_attempt(self, record: RequestRecord) -> None:
        """What was sent is not ahead of others any more, and its outcome tells nothing."""
        self._dispatcher.prefill_over(record)
        if self._awaiting.pop(record.transfer_id, None) is not None:
            self._unknown(record)
        record.transfer_id = ""
        record.key = self._ids.hex(16)

    async def _relay(
        self,
        engine: Engine,
        inbound: Inbound,
        parsed: ParsedRequest,
        body: bytes,
        sink: ClientSink,
        record: RequestRecord,
    ) -> WholeAnswer | Relayed:
        async with engine.upstream.post(parsed.api.path, self._headers(inbound), body) as response:
            content_type = response.headers.get("content-type", "")
            if response.status == 200 and content_type.startswith(EVENT_STREAM):
                answer = await relay_stream(
                    response,
                    sink,
                    self._limits,
                    _stream_headers(record, content_type),
                    partial(self._saw_events, record),
                )
            else:
                answer = await relay_whole(response, self._limits)
        if isinstance(answer, WholeAnswer) and answer.status >= 500:
            await self._raise_refusal(record, answer)
        return answer

    async def _raise_refusal(self, record: RequestRecord, answer: WholeAnswer) -> None:
        """An engine that cannot say why a request failed: its agent knows if KV was the reason.

        Raises PrefillUnavailable where it was; an error of ours stays as it is.
        """
        if not record.transfer_id or _kind_in(answer.body) in BY_KIND:
            return
        if record.outcome is None:
            waiter = self._waiters.setdefault(record.transfer_id, asyncio.Event())
            try:
                async with asyncio.timeout(self._limits.watch_stale_s):
                    await waiter.wait()
            except TimeoutError:
                return
            finally:
                self._waiters.pop(record.transfer_id, None)
        outcome = record.outcome
        if outcome is not None and outcome.status in KV_FAILED:
            raise PrefillUnavailable(
                f"remote prefill {outcome.status}: {outcome.reason or 'no reason given'}",
                retry_after_s=RETRY_AFTER_S,
            )

    def outcome(self, outcome: Outcome) -> None:
        """What D's agent reports of a transfer; those of other gateways are not ours to count."""
        record = self._awaiting.pop(outcome.transfer_id, None)
        if record is None:
            return
        record.outcome = outcome
        waiter = self._waiters.get(outcome.transfer_id)
        if waiter is not None:
            waiter.set()
        self._view.breakers.outcome(record.engine, _sent_to(record), outcome)
        self._policy.observe(record.policy_role, outcome)
        self._metrics.outcome(outcome)
        self._dispatcher.prefill_over(record)
        timer = self._timers.pop(outcome.transfer_id, None)
        if timer is not None:
            timer.cancel()
            self._log.add(record)

    def close(self) -> None:
        """Log what still waits for its outcome."""
        for transfer_id in list(self._timers):
            self._give_up(transfer_id)
        self._log.close()
        self._deadlines.close()

    def _check_model(self, parsed: ParsedRequest) -> None:
        if parsed.model is not None and parsed.model != self._settings.model:
            raise UnknownModel(
                f"the model {parsed.model!r} does not exist; this gateway serves "
                f"{self._settings.model!r}",
                param="model",
            )

    def _stays(self, parsed: ParsedRequest) -> bool:
        """Its prompt need not be looked into: nothing could make it leave D."""
        return self._is_short(parsed) or not self._needs_tokens or bool(parsed.features)

    async def _prompt(self, parsed: ParsedRequest, salt: str) -> Prompt:
        sizes = self._view.block_sizes() or PREFIX_BLOCKS
        prompt = await self._tokeniser.prompt(parsed, sizes, salt)
        if prompt.tokenised:
            self._tokenizer_check.saw(parsed)
        return prompt

    def _is_short(self, parsed: ParsedRequest) -> bool:
        return parsed.body_bytes <= self._settings.short_body_bytes

    def _facts(
        self, record: RequestRecord, parsed: ParsedRequest, prompt: Prompt, engine: str
    ) -> RequestFacts:
        short = self._is_short(parsed)
        return RequestFacts(
            request_id=record.request_id,
            prompt_tokens=prompt.tokens,
            max_tokens=parsed.max_tokens,
            features=parsed.features | prompt.features,
            quality=record.kv_quality,
            cache_known=self._view.cache_known(engine) and (prompt.tokenised or short),
            short=short,
        )

    def _client_params(self, parsed: ParsedRequest) -> transfer.TransferParams | None:
        """Transfer parameters of a trusted client; anyone else's are counted and left out."""
        if parsed.transfer is None:
            return None
        if self._settings.trust_client_transfer_params:
            return transfer.parse(parsed.transfer)  # the agent verifies the signature
        self._metrics.stripped.labels("kv_transfer_params").inc()
        return None

    def _decide(
        self, record: RequestRecord, client_params: transfer.TransferParams | None
    ) -> Decision:
        assert record.facts is not None
        assert record.snapshot is not None
        chosen = self._policy.decide(record.facts, record.snapshot, record.key)
        record.policy, record.policy_state = chosen.policy, chosen.state
        record.policy_role, record.policy_version = chosen.role, chosen.version
        record.shadow, decision = chosen.shadow, chosen.decision
        self._metrics.policy_decided(chosen)
        if client_params is not None and client_params.plan:
            plan = tuple((step.peer, step.instance) for step in client_params.plan)
            decision = replace(
                decision, target=Target.REMOTE, reason=Reason.FORCED_REMOTE, plan=plan
            )
        elif not self._settings.offload:
            decision = replace(decision, target=Target.LOCAL, reason=Reason.OFFLOAD_OFF, plan=())
        self._metrics.decided(decision)
        return decision

    def _note_dispatch(self, record: RequestRecord) -> None:
        decision = record.decision
        assert decision is not None
        if record.transfer_id:
            self._awaiting[record.transfer_id] = record
            self._metrics.offloaded_tokens.inc(decision.uncached_tokens)
        elif decision.target is Target.REMOTE:
            self._metrics.fallbacks.labels(decision.reason.value).inc()

    def _headers(self, inbound: Inbound) -> dict[str, str]:
        return {
            **inbound.passed_headers,
            "content-type": "application/json",
            "x-request-id": inbound.request_id,
            "traceparent": inbound.trace.traceparent,
        }

    def _saw_events(self, record: RequestRecord, count: int) -> None:
        gap_s = record.saw_events(count, self._clock.now())
        if gap_s is None:
            self._dispatcher.prefill_over(record)
        else:
            self._metrics.itl.observe(record.target_name, gap_s, count)

    def _note(self, record: RequestRecord, answer: WholeAnswer | Relayed) -> None:
        if isinstance(answer, Relayed):
            record.status, record.error = "200", answer.broken
        else:
            record.status = str(answer.status)
            record.error = _kind_in(answer.body) if answer.status >= 400 else ""

    def _end(self, record: RequestRecord) -> None:
        record.ended_at = self._clock.now()
        self._dispatcher.prefill_over(record)
        self._metrics.finished(record)
        if record.transfer_id in self._awaiting:
            # The feed is up to an interval behind; the log line waits for it a little.
            self._timers[record.transfer_id] = asyncio.get_running_loop().call_later(
                self._limits.watch_stale_s, self._give_up, record.transfer_id
            )
        else:
            self._log.add(record)

    def _give_up(self, transfer_id: str) -> None:
        """Nobody told in time what became of a transfer: its agent is gone, or never saw it."""
        self._timers.pop(transfer_id).cancel()
        record = self._awaiting.pop(transfer_id)
        self._unknown(record)
        self._log.add(record)

    def _unknown(self, record: RequestRecord) -> None:
        """What became of its transfer is not known, and held against nobody."""
        self._metrics.outcomes.labels("unknown").inc()
        self._view.breakers.unjudged(record.engine, _sent_to(record))


def _sent_to(record: RequestRecord) -> str:
    """The first of its plan, `peer/instance`."""
    plan = record.decision.plan if record.decision is not None else ()
    return "/".join(plan[0]) if plan else ""


def _answer_headers(record: RequestRecord) -> dict[str, str]:
    return {TARGET_HEADER: record.target_name}


def _stream_headers(record: RequestRecord, content_type: str = EVENT_STREAM) -> dict[str, str]:
    return {"content-type": content_type, **_answer_headers(record)}


def _kind_in(body: bytes) -> str:
    """The `type` in an error body in OpenAI's shape."""
    try:
        return str(msgspec.json.decode(body)["error"]["type"])
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return "other"
