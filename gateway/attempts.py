"""One job from engine to engine until one answers: choose, decide, send, relay, or try the next."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import msgspec

from gateway.admission import FallbackBudget
from gateway.cluster_view import ClusterView
from gateway.dispatch import Dispatcher
from gateway.engines import Engine, Engines
from gateway.events import Gaps, native
from gateway.ids import Ids
from gateway.job import Inbound, Job
from gateway.late_binding import LateBinding, Moved, Waiting
from gateway.live_policy import LivePolicy
from gateway.metrics import GatewayMetrics
from gateway.moves import Better
from gateway.outcomes import Outcomes
from gateway.records import RequestRecord
from gateway.relay import EVENT_STREAM, Relayed, WholeAnswer, relay_stream, relay_whole
from gateway.schema import ParsedRequest, rewrite
from gateway.stages import DECIDE, UPSTREAM
from prfaas import transfer
from prfaas.clock import Clock
from prfaas.errors import BY_KIND, EngineUnavailable, Overloaded, PrefillUnavailable
from prfaas.limits import Limits
from prfaas.settings import GatewaySettings
from prfaas.snapshot import Decision, Reason, RequestFacts, Target

logger = logging.getLogger(__name__)

TARGET_HEADER = "x-prfaas-target"
KV_FAILED = frozenset({"refused", "failed"})
"""Outcomes after which an engine has no KV to answer from, and was told not to compute it."""
RETRY_AFTER_S = 1.0
PACED_EVENTS = 8
"""A stream of fewer says nothing of its engine's pace."""
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
"""Answers that say that this engine cannot now: another one may."""
BROKEN_STATUSES = frozenset({500, 502, 504})
"""Answers that count against the engine; 429 and 503 are honest."""


class Attempts:
    """Takes a job to engines until one answers. Owns what moves requests that wait; close it with
    `close`.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        limits: Limits,
        policy: LivePolicy,
        view: ClusterView,
        engines: Engines,
        dispatcher: Dispatcher,
        outcomes: Outcomes,
        metrics: GatewayMetrics,
        budget: FallbackBudget,
        ids: Ids,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._policy = policy
        self._view = view
        self._engines = engines
        self._dispatcher = dispatcher
        self._outcomes = outcomes
        self._metrics = metrics
        self._budget = budget
        self._ids = ids
        self._now = clock.now
        self._binding = LateBinding(policy, view, budget, metrics, clock)

    async def run(self, job: Job) -> WholeAnswer | Relayed:
        """The best engine, and while nothing of an answer has come, another one where it fails, or
        another place for its prefill where that gains.

        Raises the PrfaasError of the last one, unless one before it said when to come back.
        """
        record, prompt = job.record, job.prompt
        most = min(self._limits.engine_attempts, len(self._engines))
        engine, better = self._choose(job), None
        refused: WholeAnswer | None = None
        while True:
            self._engines.sent(engine, prompt.chains, prompt.texts)
            last = len(record.tried) >= most
            try:
                with engine.serving:
                    body, waiting = self._prepared(engine, job, better)
                    if waiting is None:
                        answer = await self._relay(engine, job, body)
                    else:
                        with self._binding.listed(waiting):
                            answer = await self._relay(engine, job, body)
            except Moved as moved:
                self._engines.unjudged(engine)
                self._forget(record, "moved")
                better = moved.better
                continue
            except EngineUnavailable as exc:
                self._engines.failed(engine)
                if last and refused is not None and record.first_event_at is None:
                    return refused  # says more than that another one cannot be reached
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
                if record.events >= PACED_EVENTS and (gap_s := record.mean_gap_s) is not None:
                    self._engines.paced(engine, gap_s)
                if last or status not in RETRIED_STATUSES:
                    return answer
                if status not in BROKEN_STATUSES and isinstance(answer, WholeAnswer):
                    refused = answer
                why = f"status_{status}"
            logger.info("%s: %s failed (%s), trying another", record.request_id, engine.name, why)
            self._metrics.engine_retries.labels(engine.name, why).inc()
            self._forget(record)
            engine, better = self._choose(job), None

    def close(self) -> None:
        """Nothing moves any more."""
        self._binding.close()

    def _choose(self, job: Job) -> Engine:
        """The best engine that was not tried yet. Raises EngineUnavailable where there is none."""
        record, prompt = job.record, job.prompt
        record.begins(DECIDE, self._now())
        chosen = self._engines.choose(
            prompt.chains, prompt.tokens, record.key, record.tried, prompt.texts
        )
        if chosen is None:
            raise EngineUnavailable("no decode engine is known", retry_after_s=RETRY_AFTER_S)
        engine, record.recent_tokens = chosen
        record.engine = engine.name
        record.tried.append(engine.name)
        return engine

    def _prepared(
        self, engine: Engine, job: Job, better: Better | None
    ) -> tuple[bytes, Waiting | None]:
        """What to send, and as what it waits where it may still move."""
        # 3. What is known of every place, as of now.
        record, parsed = job.record, job.parsed
        visit = job.inbound.visit
        client_params = self._client_params(parsed)
        if better is None:
            record.facts = self._facts(job, engine.name)
            record.snapshot = visit.seen(
                self._view.snapshot(engine.name, job.prompt.chains, self._budget.free_tokens)
            )

            # 4. Decide; what waits may be decided anew, by `LateBinding`.
            if client_params is not None:
                visit.check_peers(step.peer for step in client_params.plan)
            record.decision, record.decided = self._decide(record, client_params), None
        else:
            self._move(record, better)

        # 5. Sign the plan into the body and send it to the engine.
        if client_params is not None:
            self._dispatcher.relayed(record, client_params)
            body = job.inbound.body
        else:
            params = self._dispatcher.dispatch(record, job.salt, visit.name)
            body = rewrite(parsed, params, job.salt or None)
        self._note_dispatch(record)
        # 6. D's agent carries out the plan; `Outcomes.came` hears how it went.
        # 7. Nothing goes to the client before the engine's first event; then all of it does.
        return body, None if client_params is not None else self._binding.enter(job, engine.name)

    @staticmethod
    def _move(record: RequestRecord, better: Better) -> None:
        """Decided anew; what the policy decided at first stays for the log."""
        assert record.decision is not None
        assert record.snapshot is not None
        record.decided = record.decided or (record.decision, record.snapshot)
        record.decision, record.snapshot = better.decision, better.snapshot

    def _forget(self, record: RequestRecord, status: str = "unknown") -> None:
        """What was sent is not ahead of others any more, and its outcome tells nothing."""
        self._dispatcher.prefill_over(record)
        self._outcomes.forget(record, status)
        record.transfer_id = ""
        record.key = self._ids.hex(16)

    async def _relay(self, engine: Engine, job: Job, body: bytes) -> WholeAnswer | Relayed:
        record = job.record
        path, headers = job.parsed.api.path, _headers(job.inbound)
        async with engine.upstream.post(path, headers, body) as response:
            content_type = response.headers.get("content-type", "")
            if response.status == 200 and content_type.startswith(EVENT_STREAM):
                answer = await relay_stream(
                    response,
                    job.sink,
                    self._limits,
                    stream_headers(record, content_type),
                    partial(self._saw_events, record),
                    record.completed,
                    self._gaps(record),
                )
            else:
                answer = await relay_whole(response, self._limits)
                self._say(job, answer)
        if isinstance(answer, WholeAnswer) and answer.status >= 500:
            await self._raise_refusal(record, answer)
        return answer

    @staticmethod
    def _say(job: Job, answer: WholeAnswer) -> None:
        """What no other engine could answer better goes out before all else that an end brings."""
        say = job.inbound.say
        if say is not None and answer.status < 400 and not job.parsed.stream:
            answer.headers.update(answer_headers(job.record))
            answer.said = True
            say(answer)

    async def _raise_refusal(self, record: RequestRecord, answer: WholeAnswer) -> None:
        """An engine that cannot say why a request failed: its agent knows if KV was the reason.

        Raises PrefillUnavailable where it was; an error of ours stays as it is.
        """
        if not record.transfer_id or kind_in(answer.body) in BY_KIND:
            return
        outcome = await self._outcomes.wait(record)
        if outcome is not None and outcome.status in KV_FAILED:
            raise PrefillUnavailable(
                f"remote prefill {outcome.status}: {outcome.reason or 'no reason given'}",
                retry_after_s=RETRY_AFTER_S,
            )

    def _facts(self, job: Job, engine: str) -> RequestFacts:
        parsed, prompt = job.parsed, job.prompt
        return RequestFacts(
            request_id=job.record.request_id,
            prompt_tokens=prompt.tokens,
            max_tokens=parsed.max_tokens,
            features=parsed.features | prompt.features if prompt.features else parsed.features,
            quality=job.record.kv_quality,
            cache_known=self._view.cache_known(engine) and (prompt.tokenised or job.short),
            short=job.short,
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
        record.policy_parameters = chosen.parameters
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
        record.begins(UPSTREAM, self._now(), record.engine)
        decision = record.decision
        assert decision is not None
        if record.transfer_id:
            self._outcomes.expect(record)
            self._metrics.offloaded_tokens.add(decision.uncached_tokens)
        elif decision.target is Target.REMOTE:
            self._metrics.fallbacks.inc(decision.reason.value)

    def _saw_events(self, record: RequestRecord, count: int) -> None:
        gap_s = record.saw_events(count, self._now())
        if gap_s is None:
            self._binding.begun(record)
            self._dispatcher.prefill_over(record)
        else:
            self._metrics.itl.observe(record.target_name, gap_s, count)

    def _gaps(self, record: RequestRecord) -> Gaps | None:
        """For events past Python; None where they may not go there."""
        if native is None or not self._settings.native_events:
            return None

        def note(gaps_s: list[float], now: float) -> None:
            record.saw_gaps(gaps_s, now)
            self._metrics.itl.observe_each(record.target_name, gaps_s)

        return Gaps(self._now, lambda: record.last_event_at or 0.0, note)


def answer_headers(record: RequestRecord) -> dict[str, str]:
    """Ours, on top of the engine's."""
    return {TARGET_HEADER: record.target_name}


def stream_headers(record: RequestRecord, content_type: str = EVENT_STREAM) -> dict[str, str]:
    return {"content-type": content_type, **answer_headers(record)}


def kind_in(body: bytes) -> str:
    """The `type` in an error body in OpenAI's shape."""
    try:
        return str(msgspec.json.decode(body)["error"]["type"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return "other"


def _headers(inbound: Inbound) -> dict[str, str]:
    return {
        **inbound.passed_headers,
        "content-type": "application/json",
        "x-request-id": inbound.request_id,
        "traceparent": inbound.trace.traceparent,
    }


def note_answer(record: RequestRecord, answer: WholeAnswer | Relayed) -> None:
    """How a request has ended, for its line in the log."""
    if isinstance(answer, Relayed):
        record.status, record.error = "200", answer.broken
    else:
        record.status = str(answer.status)
        record.error = kind_in(answer.body) if answer.status >= 400 else ""
