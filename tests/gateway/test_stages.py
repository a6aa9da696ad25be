"""Where a request's time went at the gateway: in its record, in metrics and in its trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.stages import (
    ADMISSION,
    DECIDE,
    FIRST_EVENT,
    TOKENISE,
    UPSTREAM,
    Stage,
    seconds_by_stage,
    seconds_of,
    stages_of,
)
from policies.registry import make_policy
from prfaas.errors import Overloaded
from prfaas.testing.gateway_setup import (
    MODEL,
    ByteTokenizer,
    completion,
    gateway_settings,
    until,
)
from prfaas.testing.scripted_engine import Script, ScriptedEngine, SeenRequest, scripted_engine
from prfaas.testing.span_collector import span_collector
from prfaas.testing.waiting import eventually
from prfaas.tracing_settings import TracingSettings

NAME = "prfaas_gateway_stage_seconds_count"


def test_each_stage_lasts_until_the_next_begins() -> None:
    marks = [(TOKENISE, 2.0, ""), (DECIDE, 3.0, ""), (UPSTREAM, 4.0, "d-0")]
    assert list(stages_of(1.0, marks, 6.0, 9.0)) == [
        Stage(ADMISSION, 1.0, 2.0),
        Stage(TOKENISE, 2.0, 3.0),
        Stage(DECIDE, 3.0, 4.0),
        Stage(UPSTREAM, 4.0, 9.0, "d-0"),
        Stage(FIRST_EVENT, 4.0, 6.0, "d-0"),
    ]


def test_what_was_refused_at_the_door_went_no_further() -> None:
    assert list(stages_of(1.0, [], None, 1.5)) == [Stage(ADMISSION, 1.0, 1.5)]


def test_each_engine_that_was_tried_is_a_stage_of_its_own() -> None:
    marks = [
        (DECIDE, 1.0, ""), (UPSTREAM, 2.0, "d-0"), (DECIDE, 4.0, ""), (UPSTREAM, 5.0, "d-1"),
    ]  # fmt: skip
    stages = list(stages_of(0.0, marks, 7.0, 8.0))
    assert [s.engine for s in stages if s.name == UPSTREAM] == ["d-0", "d-1"]
    assert stages[-1] == Stage(FIRST_EVENT, 5.0, 7.0, "d-1")
    assert seconds_by_stage(seconds_of(0.0, marks, 7.0, 8.0)) == {
        ADMISSION: 1.0, DECIDE: 2.0, UPSTREAM: 5.0, FIRST_EVENT: 2.0,
    }  # fmt: skip


@pytest.mark.parametrize("marks", [[], [(DECIDE, 2.0, ""), (UPSTREAM, 3.0, "d-0")]])
@pytest.mark.parametrize("first_event_at", [None, 6.0])
def test_seconds_are_those_of_the_stages(marks: list[Any], first_event_at: float | None) -> None:
    stages = stages_of(1.0, marks, first_event_at, 9.0)
    seconds = [(stage.name, stage.end_s - stage.start_s) for stage in stages]
    assert seconds_of(1.0, marks, first_event_at, 9.0) == seconds


async def test_metrics_and_record_have_every_stage(make_cluster: Callable[..., Any]) -> None:
    async with make_cluster() as cluster:
        status, _, response = await cluster.post(completion(stream=True))
        assert status == 200
        stages = (ADMISSION, TOKENISE, DECIDE, UPSTREAM, FIRST_EVENT)

        async def counted() -> bool:
            found = [await cluster.metric(NAME, stage=stage) for stage in stages]
            return found == [1] * len(stages)

        await eventually(counted)
        record = await cluster.record(response.headers["x-request-id"])
        assert set(record["stages_s"]) == set(stages)
        whole = sum(seconds for name, seconds in record["stages_s"].items() if name != FIRST_EVENT)
        assert whole == pytest.approx(record["e2e_s"])
        assert record["stages_s"][FIRST_EVENT] <= record["stages_s"][UPSTREAM]

        assert (await cluster.post(completion("short")))[0] == 200
        assert await cluster.metric(NAME, stage=TOKENISE) == 1, "what is short is not tokenised"


async def test_a_trace_shows_the_stages_and_each_engine_that_was_tried() -> None:
    async with AsyncExitStack() as stack:
        collector = stack.enter_context(span_collector())
        engines = [await stack.enter_async_context(scripted_engine(MODEL)) for _ in range(2)]
        names = {engine.url: f"d-{at}" for at, engine in enumerate(engines)}
        asked: list[str] = []

        def script_of(engine: ScriptedEngine) -> Callable[[SeenRequest], Script]:
            def script(_: SeenRequest) -> Script:
                asked.append(names[engine.url])
                return Script(error=Overloaded("full")) if len(asked) == 1 else Script()

            return script

        for engine in engines:
            engine.on_request = script_of(engine)
        settings = gateway_settings(
            engines=tuple({"name": n, "url": url, "agent": None} for url, n in names.items()),
            peers=(),
        ).model_copy(update={"tracing": TracingSettings(endpoint=collector.url)})
        gateway = Gateway(settings, make_policy(settings.gateway.policy), ByteTokenizer())
        await stack.enter_async_context(gateway.running())
        client = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}")
        )
        await until(lambda: all(each.probe.reachable for each in gateway.engines), "engines")
        async with client.post("/v1/completions", json=completion(stream=True)) as response:
            assert response.status == 200
            await response.read()
        await until(lambda: any(s.name == "first event" for s in collector.spans), "spans", 60)
        [root] = [span for span in collector.spans if not span.parent_id]
        stages = [span for span in collector.spans if span.parent_id == root.span_id]
        stages.sort(key=lambda span: span.start_s)
        assert [span.name for span in stages] == [
            "admission", "tokenise", "decide", "upstream", "decide", "upstream",
        ]  # fmt: skip
        tried = [span for span in stages if span.name == "upstream"]
        assert [span.attributes["prfaas.engine"] for span in tried] == asked
        [first] = [span for span in collector.spans if span.name == "first event"]
        assert first.parent_id == tried[1].span_id
        assert first.start_s == pytest.approx(tried[1].start_s)
        assert first.end_s <= tried[1].end_s
        assert len({span.span_id for span in collector.spans}) == len(collector.spans)
