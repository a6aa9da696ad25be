"""Requests that are passed on go through the same door, and engines may have a key of their own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from policies.registry import make_policy
from prfaas.testing.gateway_setup import gateway_settings, until
from prfaas.testing.routed_engine import RoutedEngine, routed_engine, says
from prfaas.testing.tenant_files import TenantFixture

RESPONSES, TOKENIZE, CHAT = "/v1/responses", "/tokenize", "/v1/chat/completions"
ENGINE_KEY = "the-key-of-the-engine"
USAGE = {"input_tokens": 7, "output_tokens": 5}


@pytest.fixture
def file(tmp_path: Path) -> TenantFixture:
    made = TenantFixture(tmp_path / "tenants.yaml")
    made.put("acme", tokens_per_minute=10_000)
    made.put("zeta")
    made.put("few", requests_per_minute=1)
    return made


@pytest.fixture
async def engine() -> AsyncIterator[RoutedEngine]:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    answers = {
        RESPONSES: says({"output": [], "usage": USAGE}),
        TOKENIZE: says({"tokens": [1, 2]}),
        CHAT: says({"choices": [], "usage": usage}),
    }
    async with routed_engine(answers, key=ENGINE_KEY) as running:
        yield running


@pytest.fixture
async def gateway(engine: RoutedEngine, file: TenantFixture) -> AsyncIterator[Gateway]:
    listed = [{"name": "d-0", "url": engine.url, "api_key": ENGINE_KEY}]
    chosen = gateway_settings(engines=listed, peers=(), tenants={"file": file.path})
    made = Gateway(chosen, make_policy(chosen.gateway.policy), None)
    async with made.running():
        await until(lambda: all(e.probe.reachable for e in made.engines), "the engine")
        yield made
        assert made.admission.in_flight == 0


async def post(gateway: Gateway, path: str, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as client,
        client.post(path, json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def test_they_need_a_key_and_are_kept_apart(
    gateway: Gateway, engine: RoutedEngine, file: TenantFixture
) -> None:
    body = {"model": "tiny", "input": "hi"}
    for headers in ({}, {"authorization": f"Bearer {ENGINE_KEY}"}):
        for path in (RESPONSES, TOKENIZE):
            status, answer = await post(gateway, path, body, headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
    assert not engine.seen
    for name in ("acme", "zeta"):
        assert (await post(gateway, RESPONSES, body, file.bearer(name)))[0] == 200
    salts = [json.loads(seen.body)["cache_salt"] for seen in engine.seen]
    assert len(set(salts)) == 2
    assert (await post(gateway, RESPONSES, body, file.bearer("few")))[0] == 200
    status, answer = await post(gateway, RESPONSES, body, file.bearer("few"))
    assert (status, answer["error"]["param"]) == (429, "requests_per_minute")


async def test_what_they_used_is_charged(
    gateway: Gateway, engine: RoutedEngine, file: TenantFixture
) -> None:
    assert gateway.tenancy is not None
    tenancy = gateway.tenancy

    def used() -> float:
        level = tenancy.quotas.level("acme", "tokens_per_minute", began)
        assert level is not None
        return 10_000 - level

    began = tenancy.door.clock.now()
    await post(gateway, RESPONSES, {"model": "tiny", "input": "hi"}, file.bearer("acme"))
    assert used() <= 12
    name = "prfaas_gateway_tenant_tokens_total"
    value = gateway.metrics.registry.get_sample_value
    assert value(name, {"tenant": "acme", "kind": "prompt"}) == 7
    assert value(name, {"tenant": "acme", "kind": "completion"}) == 5
    await post(gateway, TOKENIZE, {"prompt": "x" * 4000}, file.bearer("acme"))
    assert value(name, {"tenant": "acme", "kind": "prompt"}) == 7, "no model has run"
    assert {seen.headers["authorization"] for seen in engine.seen} == {f"Bearer {ENGINE_KEY}"}


async def test_an_engine_gets_its_own_key_and_never_a_tenants(
    gateway: Gateway, engine: RoutedEngine, file: TenantFixture
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert (await post(gateway, CHAT, body, file.bearer("acme")))[0] == 200
    assert engine.seen[-1].headers["authorization"] == f"Bearer {ENGINE_KEY}"
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as client,
        client.get("/v1/models", headers=file.bearer("acme")) as response,
    ):
        assert response.status == 200
