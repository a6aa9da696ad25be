"""One trace for a request that was prefilled at a peer: gateway, engine and both agents."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from prfaas.settings import load_settings
from prfaas.testing.span_collector import SpanCollector, span_collector
from prfaas.testing.stack import running_stack

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVICES = {"prfaas-gateway", "prfaas-engine", "prfaas-agent", "prfaas-prefill"}


def wait_for(collector: SpanCollector, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, collector.spans
        time.sleep(0.05)


def test_one_request_is_one_trace_across_four_processes(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    with span_collector() as collector:
        base = load_settings(overrides={"tracing": {"endpoint": collector.url}})
        with running_stack(
            tmp_path / "stack",
            tiny_model_dir,
            base=base,
            gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
            d_engine={"kv_memory_bytes": 16 << 20},
            p_engine={"kv_memory_bytes": 16 << 20},
        ) as stack:
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            answer = stack.complete(list(range(5, 105)), max_tokens=3, headers=headers)
            assert answer.status == 200
            unrecorded = {"traceparent": f"00-{'1' * 32}-{CALLER}-00"}
            stack.complete(list(range(9, 109)), max_tokens=3, headers=unrecorded)
            wait_for(collector, lambda: collector.of(TRACE).keys() >= SERVICES)
        found = collector.of(TRACE)
        gateway, engine, fetch, session = (
            found[f"prfaas-{name}"] for name in ("gateway", "engine", "agent", "prefill")
        )
        assert gateway.parent_id == CALLER
        assert engine.parent_id == fetch.parent_id == gateway.span_id
        assert session.parent_id == fetch.span_id
        assert len({span.span_id for span in found.values()}) == len(SERVICES)
        assert gateway.start_s <= fetch.start_s <= fetch.end_s
        assert gateway.attributes["prfaas.request_id"] == answer.request_id
        assert gateway.attributes["prfaas.target"] == "remote"
        assert gateway.attributes["prfaas.plan"] == ["p/p-0"]
        assert gateway.attributes["prfaas.outcome"] == "staged"
        assert fetch.attributes["prfaas.wire_bytes"] > 0
        assert session.attributes["prfaas.transfer_id"] == fetch.attributes["prfaas.transfer_id"]
        stages = collector.below(gateway)
        assert set(stages) == {"admission", "tokenise", "decide", "upstream"}
        in_order = [stages[name] for name in ("admission", "tokenise", "decide", "upstream")]
        assert [span.start_s for span in in_order] == sorted(span.start_s for span in in_order)
        assert all(gateway.start_s <= span.start_s <= span.end_s for span in in_order)
        upstream = stages["upstream"]
        assert upstream.attributes["prfaas.engine"] == gateway.attributes["prfaas.engine"]
        assert upstream.start_s <= engine.start_s
        assert not collector.of("1" * 32), "the caller wants it not recorded"
