"""The dashboard's page and stream, of a gateway on real sockets."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.dashboard import routes
from gateway.dashboard.feed import MAX_WATCHERS
from gateway.dashboard.gather import percentiles
from gateway.dashboard.routes import STREAM_PATH
from prfaas.snapshot import Outcome
from prfaas.testing.gateway_setup import PLACE, completion, until

FILES = re.compile(r'(?:href|src)="(/dashboard/[\w.]+)"')
IMPORTS = re.compile(r'from "\./([\w.]+)"')


class Events:
    """What one page was sent."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._text = b""

    async def next(self, name: str) -> Any:
        """Data of the next event of that name."""
        while True:
            block, found, rest = self._text.partition(b"\n\n")
            if not found:
                self._text += await self._response.content.readany()
                assert not self._response.content.at_eof(), "the stream ended"
                continue
            self._text = rest
            lines = dict(line.split(": ", 1) for line in block.decode().splitlines())
            if lines.get("event") == name:
                return json.loads(lines["data"])

    async def until(self, name: str, holds: Callable[[Any], Any]) -> Any:
        while not holds(data := await self.next(name)):
            pass
        return data


@asynccontextmanager
async def watching(client: aiohttp.ClientSession) -> AsyncIterator[Events]:
    async with client.get(STREAM_PATH) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        yield Events(response)


async def test_the_page_and_all_it_names_are_served_and_nothing_from_elsewhere(
    cluster: Any,
) -> None:
    async with cluster.client.get("/dashboard") as response:
        page = await response.text()
        assert response.content_type == "text/html"
        assert "default-src 'none'" in response.headers["content-security-policy"]
    names = set(FILES.findall(page))
    assert {"/dashboard/main.js", "/dashboard/dashboard.css"} <= names
    while names:
        async with cluster.client.get(names.pop()) as response:
            assert response.status == 200
            text = await response.text()
            names |= {f"/dashboard/{name}" for name in IMPORTS.findall(text)}
            assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "all is ours"
    async with cluster.client.get("/dashboard/", allow_redirects=False) as response:
        assert response.status == 308
    async with cluster.client.get("/dashboard/") as response:
        assert await response.text() == page
    for path in ("/dashboard/none.js", "/dashboard/..%2Froutes.py", "/dashboard/main.py"):
        async with cluster.client.get(path) as response:
            assert response.status == 404


async def test_a_page_hears_what_there_is_and_then_each_decision(cluster: Any) -> None:
    await cluster.post(completion())
    async with watching(cluster.client) as events:
        assert (await events.next("hello"))["model"] == "tiny"
        (before,) = (await events.next("requests"))["requests"]
        assert before["target"] == "remote"
        state = await events.next("state")
        assert state["status"] == "ready"
        assert state["decided"] == 1
        (engine,), (instance,), (line,) = state["engines"], state["instances"], state["links"]
        assert (engine["status"], engine["queue_tokens"]) == ("up", 2000)
        assert (instance["name"], instance["status"]) == (PLACE, "up")
        assert (line["ready"], line["goodput_bytes_per_s"], line["rtt_s"]) == (True, 50e6, 0.01)
        status, _, response = await cluster.post(completion(stream=True))
        assert status == 200
        mine = response.headers["x-request-id"]
        told = await events.until(
            "requests",
            lambda data: any(each["id"] == mine and each["status"] for each in data["requests"]),
        )
        (request,) = [each for each in told["requests"] if each["id"] == mine]
        assert request["places"] == [PLACE]
        assert request["local"]["ttft_s"] > request["remote"]["ttft_s"] > 0
        assert request["reason"] == "remote_faster"
        assert request["ttft_s"] > 0
        state = await events.until("state", lambda data: data["decided"] == 2)
        assert state["share"]["remote_requests"] == 2
        assert state["latency"]["remote"]["ttft_s"][0] > 0
        assert state["reasons"] == [["remote", "remote_faster", 2]]


async def test_outcomes_count_what_prefixes_and_codecs_saved(cluster: Any) -> None:
    _, _, response = await cluster.post(completion())
    record = await cluster.record(response.headers["x-request-id"])
    cluster.d.outcome(
        Outcome(
            record["transfer_id"], "staged", peer="p", instance="p-0", have_tokens=100,
            want_tokens=2000, received_tokens=1900, raw_bytes=1_900_000, wire_bytes=1_200_000,
        )
    )  # fmt: skip
    async with watching(cluster.client) as events:
        state = await events.until("state", lambda data: data["saved"]["raw_bytes"])
        assert state["saved"] == {
            "raw_bytes": 1_900_000,
            "wire_bytes": 1_200_000,
            "prefix_bytes": 100_000,
        }


async def test_what_is_lost_and_what_degrades_is_shown(cluster: Any) -> None:
    async with watching(cluster.client) as events:
        cluster.d.change_link(goodput_bytes_per_s=1e6, rtt_s=0.2, stalled_s=3.0)
        state = await events.until("state", lambda data: data["links"][0]["rtt_s"] == 0.2)
        assert state["links"][0]["stalled_s"] == 3.0
        cluster.p.change(ready=False)
        state = await events.until("state", lambda data: data["instances"][0]["status"] == "down")
        assert state["instances"][0]["detail"] == "its agent has no engine"
        cluster.engine.healthy = False
        state = await events.until("state", lambda data: data["engines"][0]["status"] == "down")
        assert state["status"] == "no engine"


async def test_an_engine_whose_agent_falls_silent_and_one_that_drains(make_cluster: Any) -> None:
    limits = {"watch_stale_s": 0.5}
    async with make_cluster(limits=limits) as cluster, watching(cluster.client) as events:
        cluster.d.change(draining=True)
        await events.until("state", lambda data: data["engines"][0]["status"] == "draining")
        cluster.d.silent = True
        state = await events.until("state", lambda data: data["engines"][0]["status"] == "silent")
        assert state["engines"][0]["detail"] == "it answers, but its agent does not"
        cluster.d.silent = False
        await events.until("state", lambda data: data["engines"][0]["status"] != "silent")


async def test_pages_beyond_the_bound_are_refused_with_a_time_to_come_back(cluster: Any) -> None:
    pages = [cluster.gateway.dashboard.feed.watching() for _ in range(MAX_WATCHERS)]
    for page in pages:
        page.__enter__()
    async with cluster.client.get(STREAM_PATH) as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) > 0
    for page in pages:
        page.__exit__(None, None, None)


async def test_a_page_that_leaves_is_forgotten(cluster: Any) -> None:
    feed = cluster.gateway.dashboard.feed
    async with watching(cluster.client) as events:
        await events.next("state")
        assert feed.watchers == 1
    await until(lambda: feed.watchers == 0, "the page to be forgotten")


async def test_stopping_the_gateway_ends_the_stream(make_cluster: Any) -> None:
    async with make_cluster() as cluster, watching(cluster.client) as events:
        await events.next("state")
        cluster.gateway.dashboard.close()
        with pytest.raises(AssertionError, match="the stream ended"):
            await events.next("never")


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([], None),
        ([3.0], (3.0, 3.0, 3.0)),
        ([float(at) for at in range(100, 0, -1)], (50.0, 90.0, 99.0)),
    ],
)
def test_percentiles_are_by_nearest_rank(
    values: list[float], wanted: tuple[float, float, float] | None
) -> None:
    assert percentiles(values) == wanted


async def test_a_stream_ends_in_order_after_its_life(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "LIFE_S", 0.0)
    async with watching(cluster.client) as events:
        with pytest.raises(AssertionError, match="the stream ended"):
            await events.next("never")
