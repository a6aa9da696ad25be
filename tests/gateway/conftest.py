"""A gateway on real sockets between a scripted engine and two scripted agents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from policies.registry import make_policy
from prfaas.testing.gateway_setup import (
    MODEL,
    ByteTokenizer,
    d_engine,
    gateway_settings,
    link,
    p_engine,
    until,
)
from prfaas.testing.scripted_agent import ScriptedAgent, scripted_agent
from prfaas.testing.scripted_engine import ScriptedEngine, scripted_engine


@dataclass(slots=True)
class Cluster:
    """Everything of one test; `client` talks to the gateway."""

    gateway: Gateway
    engine: ScriptedEngine
    d: ScriptedAgent
    p: ScriptedAgent
    client: aiohttp.ClientSession

    async def post(
        self, body: Any, api: str = "completions", **headers: str
    ) -> tuple[int, Any, aiohttp.ClientResponse]:
        """Status, decoded JSON (or text) and response of one request."""
        path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kind: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.client.post(path, headers=named, **kind) as response:
            if response.content_type == "application/json":
                return response.status, await response.json(), response
            return response.status, await response.text(), response

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(path) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()

    async def record(self, request_id: str) -> Any:
        status, found = await self.get(f"/prfaas/requests/{request_id}")
        assert status == 200, found
        return found

    async def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics, 0 while it does not exist."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        _, text = await self.get("/metrics")
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            found, _, rest = head.partition("{")
            if found == name and set(filter(None, rest.rstrip("}").split(","))) == wanted:
                return float(value)
        return 0.0


def is_idle(gateway: Gateway, engine: ScriptedEngine) -> bool:
    """Nothing in flight, granted or counted as sent; the engine works on nothing."""
    counts = (gateway.admission.in_flight, gateway.budget.granted_tokens, len(gateway.view.sent))
    return counts == (0, 0, 0) and engine.active == 0


@pytest.fixture
def make_cluster() -> Callable[..., Any]:
    """`async with make_cluster(**settings) as cluster`; keyword `agents=False` leaves them out."""

    @asynccontextmanager
    async def make(
        *, agents: bool = True, tokenizer: Any = None, **settings: Any
    ) -> AsyncIterator[Cluster]:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(scripted_engine(MODEL))
            d = await stack.enter_async_context(scripted_agent(d_engine(), (link(),)))
            p = await stack.enter_async_context(scripted_agent(p_engine()))
            chosen = gateway_settings(
                engine.url, d.address if agents else None, p.address, **settings
            )
            gateway = Gateway(
                chosen,
                make_policy(chosen.gateway.policy),
                tokenizer or ByteTokenizer(),
                make_policy=make_policy,
            )
            await stack.enter_async_context(gateway.running())
            client = await stack.enter_async_context(
                aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}")
            )
            if agents:
                feeds = gateway.view.feeds.values()
                await until(lambda: all(feed.engine.ready for feed in feeds), "both feeds")
            await until(lambda: gateway.engines.reachable, "the engine")
            yield Cluster(gateway, engine, d, p, client)
            await until(lambda: is_idle(gateway, engine), "everything to be given back")

    return make


@pytest.fixture
async def cluster(make_cluster: Callable[..., Any]) -> AsyncIterator[Cluster]:
    """With default settings: D busy, P idle, so a long prompt is offloaded."""
    async with make_cluster() as made:
        yield made
