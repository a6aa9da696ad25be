"""Engines and peers join and leave a running gateway, and no request is lost by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import prfaas.following
from gateway.app import Gateway
from policies.registry import make_policy
from prfaas.testing.dns_server import dns_server
from prfaas.testing.gateway_setup import (
    BLOCK_TOKENS,
    MODEL,
    PLACE,
    ByteTokenizer,
    d_engine,
    gateway_settings,
    link,
    p_engine,
)
from prfaas.testing.scripted_agent import ScriptedAgent, scripted_agent
from prfaas.testing.scripted_engine import Script, ScriptedEngine, scripted_engine
from prfaas.testing.waiting import eventually

SHORT = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prfaas.following, "LOOK_S", 0.02)


@dataclass
class World:
    """A gateway that follows a file, and engines that may be listed in it."""

    gateway: Gateway
    engines: list[ScriptedEngine]
    d: ScriptedAgent
    p: ScriptedAgent
    client: aiohttp.ClientSession
    file: Path

    def list(self, *engines: dict[str, Any], peers: Any = ()) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps({"engines": engines, "peers": list(peers)}))
        fresh.rename(self.file)

    def endpoint(self, at: int, name: str = "", **fields: Any) -> dict[str, Any]:
        return {"name": name or f"d-{at}", "url": self.engines[at].url, **fields}

    @property
    def peer(self) -> dict[str, Any]:
        peer, _, instance = PLACE.partition("/")
        return {"peer": peer, "instance": instance, "watch": self.p.address}

    async def post(self, **fields: Any) -> tuple[int, str]:
        async with self.client.post("/v1/completions", json={**SHORT, **fields}) as response:
            return response.status, await response.text()

    async def page(self, path: str) -> str:
        async with self.client.get(path) as response:
            return await response.text()

    async def up(self, *names: str) -> None:
        await eventually(
            lambda: (
                sorted(e.name for e in self.gateway.engines if e.probe.reachable) == sorted(names)
            ),
            within_s=20,
        )


@asynccontextmanager
async def world(tmp_path: Path, **settings: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine(MODEL)) for _ in range(2)]
        d = await stack.enter_async_context(scripted_agent(d_engine(), (link(),)))
        p = await stack.enter_async_context(scripted_agent(p_engine()))
        file = tmp_path / "members.yaml"
        file.write_text(json.dumps({"engines": [{"name": "d-0", "url": engines[0].url}]}))
        chosen = gateway_settings(
            **{"engines": (), "peers": (), "discovery": {"file": str(file)}, **settings}
        )
        made = Gateway(chosen, make_policy(chosen.gateway.policy), ByteTokenizer())
        await stack.enter_async_context(made.running())
        client = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{made.port}")
        )
        yield World(made, engines, d, p, client, file)


async def test_an_engine_that_joins_gets_requests_and_one_that_leaves_gets_none(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as made:
        await made.up("d-0")
        made.list(made.endpoint(0), made.endpoint(1))
        await made.up("d-0", "d-1")
        for _ in range(20):
            assert (await made.post())[0] == 200
        assert made.engines[0].seen
        assert made.engines[1].seen
        made.list(made.endpoint(1))
        await made.up("d-1")
        before = len(made.engines[0].seen)
        for _ in range(5):
            assert (await made.post())[0] == 200
        assert len(made.engines[0].seen) == before
        assert "d-0" not in made.gateway.view.breakers.engines
        page = await made.page("/metrics")
        source = f'source="{made.file}"'
        changes, found = "discovery_changes_total", "discovered_members"
        assert f'prfaas_gateway_{changes}{{result="applied",{source}}} 2.0' in page
        assert f'prfaas_gateway_{found}{{kind="engine",{source}}} 1.0' in page


async def test_what_an_engine_that_left_is_answering_goes_on_to_its_end(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await made.up("d-0")
        made.engines[0].script = Script(texts=("a", "b", "c", "d"), token_delay_s=0.25)
        task = asyncio.create_task(made.post(stream=True))
        await eventually(lambda: made.engines[0].active == 1)
        made.list(made.endpoint(1))
        await made.up("d-1")
        assert made.gateway.membership.draining == 1
        status, text = await task
        assert status == 200
        assert text.endswith("data: [DONE]\n\n")
        await eventually(lambda: made.gateway.membership.draining == 0)


async def test_an_engine_that_moves_keeps_its_name_and_its_requests(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await made.up("d-0")
        made.engines[0].script = Script(texts=("a", "b", "c"), token_delay_s=0.25)
        task = asyncio.create_task(made.post(stream=True))
        await eventually(lambda: made.engines[0].active == 1)
        old = made.gateway.engines["d-0"]
        made.list(made.endpoint(1, "d-0"))
        await eventually(lambda: made.gateway.engines["d-0"] is not old)
        await made.up("d-0")
        assert (await made.post())[0] == 200
        assert len(made.engines[1].seen) == 1
        assert (await task)[1].endswith("data: [DONE]\n\n")
        await eventually(lambda: made.gateway.membership.draining == 0)


async def test_agents_and_peers_are_followed_as_they_come_and_go(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await made.up("d-0")
        feeds = made.gateway.view.feeds
        assert not feeds
        made.list(made.endpoint(0, agent=made.d.address), peers=[made.peer])
        await eventually(
            lambda: (
                set(feeds) == {"d-0", PLACE} and all(each.engine.ready for each in feeds.values())
            ),
            within_s=20,
        )
        await made.up("d-0")
        status, _ = await made.post(prompt="x" * 2000)
        assert status == 200
        body = made.engines[0].seen[-1].body
        assert body["kv_transfer_params"]["plan"]  # it was sent to the peer
        assert made.gateway.view.block_sizes() == {BLOCK_TOKENS}
        made.list(made.endpoint(0, agent=made.d.address))
        await eventually(lambda: set(feeds) == {"d-0"})
        assert (await made.post(prompt="y" * 2000))[0] == 200
        assert "kv_transfer_params" not in made.engines[0].seen[-1].body
        made.list(made.endpoint(0))
        await eventually(lambda: not feeds)


async def test_an_address_that_may_not_be_dialled_changes_nothing(tmp_path: Path) -> None:
    """Without TLS only loopback is: the whole file is refused."""
    async with world(tmp_path) as made:
        await made.up("d-0")
        made.list(made.endpoint(1, agent="10.0.0.1:8101"))
        labels = f'result="refused",source="{made.file}"'
        line = f"prfaas_gateway_discovery_changes_total{{{labels}}} 1.0"

        async def refused() -> bool:
            return line in await made.page("/metrics")

        await eventually(refused, within_s=20)
        assert [each.name for each in made.gateway.engines] == ["d-0"]
        assert (await made.post())[0] == 200


async def test_a_gateway_waits_for_a_name_to_have_its_first_engine(tmp_path: Path) -> None:
    async with dns_server({}) as server:
        found = {
            "engines": [{"name": "localengines.test", "port": 1}],
            "dns_server": server.address,
            "interval_s": 0.05,
        }
        async with world(tmp_path, discovery=found) as made:
            async with made.client.get("/ready") as response:
                assert response.status == 503
            status, text = await made.post()
            assert status == 502
            assert json.loads(text)["error"]["message"] == "no decode engine is known"
            assert json.loads(await made.page("/prfaas/cluster"))["engines"] == []
            assert (await made.post(stream=True))[0] == 502
            server.records["localengines.test", "A"] = ["127.0.0.1"]
            await eventually(lambda: len(made.gateway.engines) == 1, within_s=20)


async def test_engines_behind_a_service_name_serve(tmp_path: Path) -> None:
    async with dns_server({("d-7.test", "A"): ["127.0.0.1"]}) as server:
        found = {
            "engines": [{"name": "_http._tcp.d.test", "kind": "service"}],
            "dns_server": server.address,
            "interval_s": 0.05,
        }
        async with world(tmp_path, discovery=found) as made:
            ports = [each.url.rpartition(":")[2] for each in made.engines]
            server.records["_http._tcp.d.test", "SRV"] = [f"0 0 {ports[0]} d-7.test."]
            await made.up("d-7")
            assert (await made.post())[0] == 200
            server.records["_http._tcp.d.test", "SRV"] = [f"0 0 {ports[1]} d-7.test."]
            old = made.gateway.engines["d-7"]
            await eventually(lambda: made.gateway.engines["d-7"] is not old, within_s=20)
            await made.up("d-7")
            assert (await made.post())[0] == 200
            assert len(made.engines[1].seen) == 1
