"""Finished spans, handed to OpenTelemetry's exporter; imported only where traces are wanted."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Literal

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceFlags

from prfaas.trace_context import SpanContext
from prfaas.tracing_settings import TracingSettings

Kind = Literal["server", "client", "internal"]
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

MAX_WAITING = 2048
BATCH = 512
SEND_S = 1.0
"""Spans are sent after so long, or so many together; more than that wait, and some are lost."""
TIMEOUT_S = 5.0

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}


class Spans:
    """Owns the exporter and its thread; close it with `close`, which sends what waits.

    Spans are made when they have ended, with the ids that others were told meanwhile.
    """

    def __init__(self, settings: TracingSettings, service: str) -> None:
        version = importlib.metadata.version("prfaas")
        self._resource = Resource.create(
            {
                "service.name": settings.service_name or f"prfaas-{service}",
                "service.version": version,
            }
        )
        self._scope = InstrumentationScope("prfaas", version)
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        exporter = OTLPSpanExporter(settings.endpoint, headers=headers, timeout=TIMEOUT_S)
        self._processor = BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_WAITING,
            max_export_batch_size=BATCH,
            schedule_delay_millis=1e3 * SEND_S,
        )

    def add(
        self,
        name: str,
        kind: Kind,
        context: SpanContext,
        parent_id: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        *,
        error: str = "",
        events: Sequence[tuple[str, float]] = (),
    ) -> None:
        """A span that has ended. Times in Unix seconds; `parent_id` empty: it begins the trace."""
        parent = _otel(SpanContext(context.trace_id, parent_id, context.flags), remote=True)
        status = Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET)
        self._processor.on_end(
            ReadableSpan(
                name=name,
                context=_otel(context),
                parent=parent if parent_id else None,
                resource=self._resource,
                attributes={key: value for key, value in attributes.items() if value != ""},
                events=[Event(what, timestamp=_ns(at_s)) for what, at_s in events],
                kind=_KINDS[kind],
                status=status,
                start_time=_ns(start_s),
                end_time=_ns(end_s),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Blocks for as long as sending takes, at most TIMEOUT_S or so."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _otel(context: SpanContext, *, remote: bool = False) -> trace.SpanContext:
    return trace.SpanContext(
        int(context.trace_id, 16),
        int(context.span_id or "0", 16),
        is_remote=remote,
        trace_flags=TraceFlags(context.flags),
    )
