"""Whether this process records traces: off is nothing but a None."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.errors import ConfigError
from prfaas.tracing_settings import TracingSettings

if TYPE_CHECKING:
    from prfaas.tracing import Spans


def open_spans(settings: TracingSettings, service: str) -> Spans | None:
    """None without an endpoint. Raises ConfigError where OpenTelemetry is not installed."""
    if not settings.endpoint:
        return None
    try:
        from prfaas.tracing import Spans
    except ImportError as exc:
        raise ConfigError(
            "tracing.endpoint: traces need OpenTelemetry: pip install 'prfaas[otel]'",
            field="tracing.endpoint",
        ) from exc
    return Spans(settings, service)
