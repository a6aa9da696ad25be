"""What the gateway passes on as it is, the engine's usage and the caller's trace, and the comments
that a client hears meanwhile.
"""

import json
from typing import Any

import pytest

from prfaas.errors import Overloaded
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


COMMENT = ": keepalive\n\n"


async def test_who_waits_long_for_a_stream_hears_comments_and_gets_it_whole(
    make_cluster: Any,
) -> None:
    """The engine says nothing at all, not even a head, until its first token."""
    async with make_cluster(limits={"sse_keepalive_s": 0.1}) as cluster:
        cluster.engine.script = Script(first_delay_s=0.35, texts=("a", "b"))
        status, text, response = await cluster.post({**SHORT, "stream": True})
        assert status == 200
        assert response.headers["x-prfaas-target"] == "local"
        comments, _, _ = text.partition("data: ")
        assert comments == COMMENT * (len(comments) // len(COMMENT))
        assert len(comments) >= len(COMMENT)
        assert text.endswith("data: [DONE]\n\n")
        record = await cluster.record(response.headers["x-request-id"])
        assert (record["status"], record["error"]) == ("200", None)


async def test_silence_between_tokens_is_broken_too(make_cluster: Any) -> None:
    async with make_cluster(limits={"sse_keepalive_s": 0.1}) as cluster:
        cluster.engine.script = Script(texts=("a", "b"), token_delay_s=0.25)
        _, text, _ = await cluster.post({**SHORT, "stream": True})
        events = text.split("\n\n")
        assert events[0].startswith("data: ")
        assert events[1] == ": keepalive"
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stop_after", [None, 0])
async def test_a_failure_after_a_comment_is_said_in_the_stream(
    make_cluster: Any, stop_after: int | None
) -> None:
    """A status of its own comes too late: an error event, no [DONE], and the connection closes."""
    async with make_cluster(limits={"sse_keepalive_s": 0.1}) as cluster:
        error = Overloaded("full") if stop_after is None else None
        cluster.engine.script = Script(
            first_delay_s=0.25, error=error, stop_after=stop_after, then="cut"
        )
        status, text, response = await cluster.post({**SHORT, "stream": True})
        assert status == 200
        assert text.startswith(COMMENT)
        last = text.rstrip().rsplit("\n\n", 1)[-1]
        kind = json.loads(last.removeprefix("data: "))["error"]["type"]
        assert kind == ("overloaded" if error else "engine_unavailable")
        assert "[DONE]" not in text
        record = await cluster.record(response.headers["x-request-id"])
        assert record["error"]


async def test_an_answer_that_is_not_streamed_hears_no_comments(make_cluster: Any) -> None:
    async with make_cluster(limits={"sse_keepalive_s": 0.05}) as cluster:
        cluster.engine.script = Script(first_delay_s=0.2)
        status, answer, _ = await cluster.post(SHORT)
        assert status == 200
        assert answer["choices"]
