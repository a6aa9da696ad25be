"""Spans over real sockets to a collector, and none where none are wanted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prfaas.errors import ConfigError
from prfaas.testing.span_collector import span_collector
from prfaas.trace_context import SpanContext
from prfaas.tracing_on import open_spans
from prfaas.tracing_settings import TracingSettings

CONTEXT = SpanContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def test_a_span_arrives_whole_with_our_ids_and_the_collectors_key() -> None:
    with span_collector() as collector:
        settings = TracingSettings(endpoint=collector.url, headers={"x-key": "secret"})
        spans = open_spans(settings, "gateway")
        assert spans is not None
        spans.add(
            "POST chat", "server", CONTEXT, "a" * 16, 100.0, 101.5,
            {"prfaas.plan": ["p/p-0"], "prfaas.tokens": 7, "prfaas.empty": ""},
            error="engine_unavailable", events=[("first token", 100.5)],
        )  # fmt: skip
        spans.close()
        (span,) = collector.spans
        assert collector.headers[0]["x-key"] == "secret"
    assert (span.service, span.name) == ("prfaas-gateway", "POST chat")
    assert (span.trace_id, span.span_id) == (CONTEXT.trace_id, CONTEXT.span_id)
    assert span.parent_id == "a" * 16
    assert (span.start_s, span.end_s) == (100.0, 101.5)
    assert span.attributes == {"prfaas.plan": ["p/p-0"], "prfaas.tokens": 7}
    assert span.error == "engine_unavailable"


def test_what_the_caller_does_not_record_is_not_sent() -> None:
    with span_collector() as collector:
        spans = open_spans(TracingSettings(endpoint=collector.url), "gateway")
        assert spans is not None
        unrecorded = SpanContext(CONTEXT.trace_id, CONTEXT.span_id, 0)
        spans.add("POST chat", "server", unrecorded, "", 100.0, 101.0, {})
        spans.close()
    assert collector.spans == []


def test_off_loads_nothing() -> None:
    code = (
        "import gateway.app, remote_prefill.agent_main, remote_prefill.prefill_main, sys;"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert open_spans(TracingSettings(), "gateway") is None


def test_without_the_packages_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "prfaas.tracing", raising=False)
    with pytest.raises(ConfigError, match=r"prfaas\[otel\]"):
        open_spans(TracingSettings(endpoint="http://127.0.0.1:1/v1/traces"), "gateway")
