"""The gateway's spans of each request, made from its record when it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.records import RequestRecord
from gateway.stages import FIRST_EVENT, UPSTREAM
from prfaas.trace_context import SpanContext

if TYPE_CHECKING:
    from prfaas.tracing import Spans


class RequestSpans:
    """Borrows the exporter."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def add(self, record: RequestRecord) -> None:
        """A record that has ended; one that nobody traces is left out."""
        trace = record.trace
        if trace is None:
            return
        start_s = record.started_wall
        ttft_s = record.ttft_s
        whole = SpanContext(trace.trace_id, trace.span_id, int(trace.flags, 16))
        self._spans.add(
            f"POST {record.api}",
            "server",
            whole,
            trace.parent_id,
            start_s,
            start_s + (record.e2e_s or 0.0),
            _attributes(record),
            error=record.error,
            events=[] if ttft_s is None else [("first token", start_s + ttft_s)],
        )
        self._add_stages(record, whole)

    def _add_stages(self, record: RequestRecord, whole: SpanContext) -> None:
        """Below the request's own span, and the first token below the engine it came from."""
        to_wall_s = record.started_wall - record.started_at
        parent = whole
        for stage in record.stages:
            context = whole.child()
            self._spans.add(
                stage.name.replace("_", " "),
                "client" if stage.name == UPSTREAM else "internal",
                context,
                (parent if stage.name == FIRST_EVENT else whole).span_id,
                stage.start_s + to_wall_s,
                stage.end_s + to_wall_s,
                {"prfaas.engine": stage.engine},
            )
            parent = context


def _attributes(record: RequestRecord) -> dict[str, str | int | float | bool | list[str]]:
    """Decision, estimates and outcome; nothing of the prompt."""
    found: dict[str, str | int | float | bool | list[str]] = {
        "http.response.status_code": int(record.status or 0),
        "prfaas.request_id": record.request_id,
        "prfaas.tenant": record.tenant,
        "prfaas.engine": record.engine,
        "prfaas.engines_tried": list(record.tried),
        "prfaas.stream": record.stream,
        "prfaas.target": record.target_name,
        "prfaas.transfer_id": record.transfer_id,
        "prfaas.policy": record.policy,
        "prfaas.policy_role": record.policy_role,
    }
    if record.facts is not None:
        found["prfaas.prompt_tokens"] = record.facts.prompt_tokens
    decision = record.decision
    if decision is not None:
        found["prfaas.reason"] = decision.reason.value
        found["prfaas.uncached_tokens"] = decision.uncached_tokens
        found["prfaas.plan"] = ["/".join(step) for step in decision.plan]
        for estimate in decision.estimates:
            found[f"prfaas.estimate.{estimate.where}_s"] = estimate.ttft_s
    if record.ttft_s is not None:
        found["prfaas.ttft_s"] = record.ttft_s
    outcome = record.outcome
    if outcome is not None:
        found["prfaas.outcome"] = outcome.status
        found["prfaas.outcome_reason"] = outcome.reason
    return found
