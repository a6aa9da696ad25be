"""Clients that keep their connections, idle, and then come all at once."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

import gateway.upstream
from gateway.app import Gateway
from policies.registry import make_policy
from prfaas.testing.gateway_setup import MODEL, gateway_settings, until
from prfaas.testing.routed_engine import routed_engine, says

CLIENTS = 64


async def test_no_reset_reaches_a_client_after_an_idle_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 40: the engine has closed every connection meanwhile, sooner than the gateway would."""
    # How soon a closed connection must be noticed depends on the machine.
    monkeypatch.setattr(gateway.upstream, "CLOSED_WHILE_IDLE_S", 30.0)
    answer = {"id": "c", "object": "text_completion", "created": 1, "model": MODEL, "choices": []}
    async with routed_engine({"/v1/completions": says(answer)}, keepalive_s=0.15) as engine:
        chosen = gateway_settings(engine.url, None, peers=())
        made = Gateway(chosen, make_policy(chosen.gateway.policy), None)
        connector = aiohttp.TCPConnector(limit=CLIENTS)
        async with (
            made.running(),
            aiohttp.ClientSession(f"http://127.0.0.1:{made.port}", connector=connector) as client,
        ):
            await until(lambda: made.engines.reachable, "the engine")

            async def ask() -> int:
                body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
                async with client.post("/v1/completions", json=body) as response:
                    await response.read()
                    return response.status

            for _ in range(3):
                statuses = await asyncio.gather(*(ask() for _ in range(CLIENTS)))
                assert statuses == [200] * CLIENTS
                await asyncio.sleep(0.3)
        assert len(engine.seen) == 3 * CLIENTS
