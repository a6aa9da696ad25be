"""Where traces go."""

from __future__ import annotations

from pydantic import Field, SecretStr

from prfaas.section import Section


class TracingSettings(Section):
    """OpenTelemetry traces of one process (docs/tracing.md); needs `prfaas[otel]`."""

    endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`; empty: no traces.",
    )
    headers: dict[str, SecretStr] = Field(
        {}, description="Headers of what is sent there, a collector's key among them."
    )
    sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests that are recorded, where the caller has not decided it.",
    )
    service_name: str = Field("", description="Name of the service; default: prfaas-COMMAND.")
