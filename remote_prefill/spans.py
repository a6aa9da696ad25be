"""Spans of KV on its way, at both ends, made when a fetch or a session has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.clock import Clock
from prfaas.snapshot import Outcome
from prfaas.trace_context import SpanContext

if TYPE_CHECKING:
    from prfaas.tracing import Spans

FAILED = frozenset({"partial", "local", "refused", "failed"})


def add_fetch(
    spans: Spans,
    context: SpanContext,
    parent_id: str,
    outcome: Outcome,
    took_s: float,
    clock: Clock,
) -> None:
    """At D: from the engine's wish to its import."""
    now_s = clock.wall()
    spans.add(
        "kv fetch",
        "client",
        context,
        parent_id,
        now_s - took_s,
        now_s,
        {
            "prfaas.transfer_id": outcome.transfer_id,
            "prfaas.outcome": outcome.status,
            "prfaas.outcome_reason": outcome.reason,
            "prfaas.peer": outcome.peer,
            "prfaas.instance": outcome.instance,
            "prfaas.instances_tried": list(outcome.tried),
            "prfaas.have_tokens": outcome.have_tokens,
            "prfaas.want_tokens": outcome.want_tokens,
            "prfaas.received_tokens": outcome.received_tokens,
            "prfaas.raw_bytes": outcome.raw_bytes,
            "prfaas.wire_bytes": outcome.wire_bytes,
            "prfaas.kv_quality": outcome.quality,
            **{f"prfaas.phase.{name}_s": value for name, value in outcome.phases.items()},
        },
        error=outcome.reason or outcome.status if outcome.status in FAILED else "",
    )


def add_session(
    spans: Spans,
    parent: SpanContext,
    *,
    transfer_id: str,
    client: str,
    state: str,
    reason: str,
    tokens: int,
    wire_bytes: int,
    took_s: float,
    clock: Clock,
) -> None:
    """At P: from OPEN to the end of the session."""
    now_s = clock.wall()
    spans.add(
        "kv session",
        "server",
        parent.child(),
        parent.span_id,
        now_s - took_s,
        now_s,
        {
            "prfaas.transfer_id": transfer_id,
            "prfaas.client": client,
            "prfaas.state": state,
            "prfaas.prompt_tokens": tokens,
            "prfaas.wire_bytes": wire_bytes,
        },
        error=reason,
    )
