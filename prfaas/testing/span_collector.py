"""An OpenTelemetry collector for tests: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """One span as it arrived; ids in hex, times in Unix seconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    error: str
    attributes: dict[str, Any]


@dataclass(slots=True)
class SpanCollector:
    """What was collected so far, from any number of processes. Made by `span_collector`."""

    url: str = ""
    spans: list[SeenSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def of(self, trace_id: str) -> dict[str, SeenSpan]:
        """Of one trace the first span of each service; those below it are in `below`."""
        spans = [span for span in tuple(self.spans) if span.trace_id == trace_id]
        own = {(span.service, span.span_id) for span in spans}
        return {span.service: span for span in spans if (span.service, span.parent_id) not in own}

    def below(self, parent: SeenSpan) -> dict[str, SeenSpan]:
        """Spans of the same service and below that one, by name."""
        return {
            span.name: span
            for span in tuple(self.spans)
            if (span.service, span.parent_id) == (parent.service, parent.span_id)
        }

    def take(self, data: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            service = _plain(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        SeenSpan(
                            service,
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano / 1e9,
                            span.end_time_unix_nano / 1e9,
                            span.status.message,
                            _plain(span.attributes),
                        )
                    )


def _plain(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        if kind == "array_value":
            value = [getattr(item, item.WhichOneof("value")) for item in value.values]
        found[each.key] = value
    return found


@contextmanager
def span_collector() -> Iterator[SpanCollector]:
    """A collector that listens on loopback."""
    collector = SpanCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            data = self.rfile.read(size)
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                data = gzip.decompress(data)
            collector.headers.append({k.lower(): v for k, v in self.headers.items()})
            collector.take(data)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
