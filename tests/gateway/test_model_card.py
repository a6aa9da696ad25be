"""The model's card: an engine's own where one answers, ours where none does."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cluster_view import ClusterView
from gateway.engines import Engines
from gateway.model_card import ModelCard
from gateway.upstream import HttpUpstream
from prfaas.clock import SYSTEM_CLOCK
from prfaas.limits import Limits
from prfaas.testing.gateway_setup import MODEL, gateway_settings
from prfaas.testing.routed_engine import routed_engine

CARD = {"id": MODEL, "object": "model", "max_model_len": 100, "root": "x"}


async def card_of(url: str, reachable: bool = True) -> Any:
    limits = Limits()
    upstream = HttpUpstream(url, "d-0", limits)
    view = ClusterView(gateway_settings().gateway, limits)
    engines = Engines({"d-0": upstream}, view, limits, SYSTEM_CLOCK, lambda engine: None)
    engines["d-0"].probe.reachable = reachable
    try:
        return await ModelCard(MODEL, engines, limits).card({})
    finally:
        await upstream.close()


async def test_an_engines_card_has_all_it_says() -> None:
    async with routed_engine(card=CARD) as engine:
        assert await card_of(engine.url) == CARD


@pytest.mark.parametrize("card", [{}, {"id": "other"}])
async def test_where_no_engine_has_one_there_is_ours(card: dict[str, Any]) -> None:
    async with routed_engine(card=card) as engine:
        made = await card_of(engine.url)
    assert (made["id"], made["object"], made["owned_by"]) == (MODEL, "model", "prfaas")


async def test_nobody_waits_for_an_engine_that_is_away() -> None:
    assert (await card_of("http://127.0.0.1:1", reachable=False))["owned_by"] == "prfaas"
    assert (await card_of("http://127.0.0.1:1"))["owned_by"] == "prfaas"
