"""Which engines have an endpoint: as configured, as they say, and asked no more than needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from gateway.abilities import ASK_AGAIN_S, Abilities, Offer
from gateway.cluster_view import ClusterView
from gateway.engine_room import EngineRoom
from gateway.engines import Engine
from gateway.passed import PassedApi
from prfaas.errors import EngineUnavailable
from prfaas.limits import Limits
from prfaas.settings import EngineEndpoint
from prfaas.testing.clock import ManualClock
from prfaas.testing.gateway_setup import gateway_settings

EMBEDDINGS = PassedApi.EMBEDDINGS


class _Upstream:
    """Answers every question with `status`, counted; None: no connection."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        self.asked: list[Mapping[str, str]] = []
        self.headers: dict[str, str] = {}

    @asynccontextmanager
    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[Any]:
        assert (method, path) == ("GET", "/v1/embeddings")
        self.asked.append(headers)
        await asyncio.sleep(0)
        if self.status is None:
            raise EngineUnavailable("gone")
        yield self

    async def read(self, limit_bytes: int) -> bytes:
        return b""


def made(status: int | None) -> tuple[Abilities, Engine, _Upstream, ManualClock]:
    clock, upstream = ManualClock(), _Upstream(status)
    view = ClusterView(gateway_settings().gateway, Limits(), clock)
    room = EngineRoom(Limits(), view, clock)
    engine = Engine("d-0", cast(Any, upstream), Limits(), clock, lambda engine: None, room)
    return Abilities(Limits(), clock), engine, upstream, clock


@pytest.mark.parametrize(
    ("status", "offer"),
    [(405, "yes"), (404, "no"), (200, "unknown"), (401, "unknown"), (None, "unknown")],
)
async def test_what_an_answer_means(status: int | None, offer: str) -> None:
    abilities, engine, _, _ = made(status)
    assert await abilities.offer(engine, EMBEDDINGS, {}) == offer
    assert list(abilities.told()) == [("d-0", EMBEDDINGS, offer)]


async def test_many_who_want_to_know_ask_once() -> None:
    abilities, engine, upstream, _ = made(405)
    offers = await asyncio.gather(*(abilities.offer(engine, EMBEDDINGS, {}) for _ in range(9)))
    assert offers == [Offer.YES] * 9
    assert len(upstream.asked) == 1


async def test_the_key_of_the_client_goes_along() -> None:
    abilities, engine, upstream, _ = made(405)
    await abilities.offer(engine, EMBEDDINGS, {"authorization": "Bearer k"})
    assert upstream.asked == [{"authorization": "Bearer k"}]


async def test_a_no_is_doubted_after_a_while_and_a_yes_when_the_engine_was_lost() -> None:
    abilities, engine, upstream, clock = made(404)
    assert await abilities.offer(engine, EMBEDDINGS, {}) is Offer.NO
    upstream.status = 405
    clock.advance(ASK_AGAIN_S / 2)
    assert await abilities.offer(engine, EMBEDDINGS, {}) is Offer.NO
    clock.advance(ASK_AGAIN_S)
    assert await abilities.offer(engine, EMBEDDINGS, {}) is Offer.YES
    upstream.status = 404
    clock.advance(10 * ASK_AGAIN_S)
    assert await abilities.offer(engine, EMBEDDINGS, {}) is Offer.YES
    engine.probe.losses += 1
    assert await abilities.offer(engine, EMBEDDINGS, {}) is Offer.NO


async def test_what_is_configured_is_not_asked_and_goes_with_the_engine() -> None:
    abilities, engine, upstream, _ = made(404)
    abilities.joined(EngineEndpoint(name="d-0", url="http://h:1", apis=("embeddings",)))
    assert await abilities.offer(engine, EMBEDDINGS, {}) is Offer.YES
    assert await abilities.offer(engine, PassedApi.RESPONSES, {}) is Offer.NO
    assert not upstream.asked
    abilities.forget("d-0")
    assert await abilities.offer(engine, EMBEDDINGS, {}) is Offer.NO
    assert upstream.asked
