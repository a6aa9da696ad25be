"""What the gateway passes on as it is: the engine's usage, the caller's trace."""

import json
from typing import Any

from prfaas.testing.gateway_setup import MODEL, completion
from prfaas.testing.scripted_engine import Script

SHORT = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


async def test_usage_is_relayed_as_the_engine_says(cluster: Any) -> None:
    cluster.engine.script = Script(cached_tokens=1999)
    _, answer, _ = await cluster.post(completion())
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1999
    body = completion(stream=True, stream_options={"include_usage": True})
    _, text, _ = await cluster.post(body)
    usage = [json.loads(line[6:])["usage"] for line in text.splitlines()[:-2] if line]
    assert [u is not None for u in usage] == [False] * (len(usage) - 1) + [True]
    assert usage[-1]["prompt_tokens_details"]["cached_tokens"] == 1999


async def test_trace_context_is_passed_on(cluster: Any) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    await cluster.post(SHORT, traceparent=f"00-{trace}-00f067aa0ba902b7-01", tracestate="v=1")
    seen = cluster.engine.seen[0].headers
    assert seen["traceparent"].split("-")[1] == trace
    assert seen["traceparent"].split("-")[2] != "00f067aa0ba902b7"
    assert seen["tracestate"] == "v=1"
