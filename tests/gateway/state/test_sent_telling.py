"""Gateways know at once what the others have sent, so that together they place as one would."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.cluster_view import ClusterView
from gateway.state.memory import MemoryStore
from gateway.state.metrics import StateMetrics
from gateway.state.redis_store import RedisStore
from gateway.state.sync import StateSync
from policies.registry import make_policy
from prfaas.clock import SYSTEM_CLOCK
from prfaas.cluster_state import ClusterStore, Sent
from prfaas.errors import StateUnavailable
from prfaas.settings import PolicySettings, StateSettings
from prfaas.snapshot import RequestFacts
from prfaas.telemetry import WatchUpdate
from prfaas.testing.gateway_setup import ENGINE, PEER, d_engine, gateway_settings, link, p_engine
from prfaas.testing.redis_server import WHY_SKIPPED, RedisServer, found, redis_server
from prfaas.testing.waiting import eventually

INSTANCES = [f"p-{at}" for at in range(4)]
SELDOM_S = 10.0
"""Between two exchanges, so that what is known in time was told between them."""


class Placing:
    """One gateway, as far as it decides: idle instances, and what was sent to them."""

    def __init__(self, store: ClusterStore, **state: Any) -> None:
        peers = tuple({"peer": PEER, "instance": i, "watch": "127.0.0.1:1"} for i in INSTANCES)
        settings = gateway_settings(peers=peers)
        self.view = ClusterView(settings.gateway, settings.limits, SYSTEM_CLOCK)
        self.hear(
            ENGINE,
            engines=(d_engine(queue_tokens=100_000),),
            links=tuple(link(instance=i) for i in INSTANCES),
        )
        for instance in INSTANCES:
            self.hear(f"{PEER}/{instance}", engines=(p_engine(name=instance),))
        self.policy = make_policy(PolicySettings(name="least_ttft"))
        self.registry = CollectorRegistry()
        state_settings = StateSettings(**{"interval_s": SELDOM_S, **state})
        metrics = StateMetrics(self.registry)
        self.sync = StateSync(
            state_settings, store, self.view, None, tuple, None, metrics, SYSTEM_CLOCK
        )

    def hear(self, place: str, **fields: Any) -> None:
        self.view.update(place, WatchUpdate(1, True, **fields))

    def place(self, request_id: str) -> str:
        """Where the prompt goes, which is sent there."""
        facts = RequestFacts(request_id, 2000, cache_known=True)
        snapshot = self.view.snapshot(ENGINE, {})
        decision = self.policy.decide(facts, snapshot, self.policy.initial_state())
        where = "/".join(decision.plan[0])
        self.view.sent.add_remote(request_id, ENGINE, where, 2000, 2_000_000, 1_600_000)
        return where

    def told(self, result: str) -> float:
        value = self.registry.get_sample_value(
            "prfaas_gateway_state_sent_total", {"result": result}
        )
        return value or 0.0


@asynccontextmanager
async def running(*made: Placing) -> AsyncIterator[None]:
    """Until they know of each other, and then while the context lasts."""
    for one in made * 2:
        await one.sync.exchange()
    tasks = [asyncio.create_task(one.sync.sent.run()) for one in made]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def placed(made: list[Placing], requests: int) -> list[str]:
    """Where requests go that come to each in turn, as soon as the others know of the one before;
    no feed shows any of them.
    """
    places: list[str] = []
    for at in range(requests):
        places.append(made[at % len(made)].place(f"r{at}"))

        def known(one: Placing, places: list[str] = places) -> bool:
            loads = [r.load for r in one.view.snapshot(ENGINE, {}).remotes]
            return sum(load.sent_requests for load in loads) == len(places)

        await eventually(lambda: all(known(one) for one in made), within_s=20)
    return places


@pytest.mark.skipif(not found(), reason=WHY_SKIPPED)
async def test_gateways_that_share_a_redis_spread_a_burst_as_one_would(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server:
        stores = [_redis(server) for _ in range(2)]
        made = [Placing(store) for store in stores]
        async with running(*made):
            await _heard_by_all(made)
            places = await placed(made, 8)
        assert places == await placed([Placing(MemoryStore(SYSTEM_CLOCK))], 8)
        assert sorted(places) == sorted(f"{PEER}/{i}" for i in INSTANCES * 2)
        snapshot = made[1].view.snapshot(ENGINE, {})
        assert made[1].view.transfers(ENGINE) == 8, "of the others as well"
        assert snapshot.local.free_staging_bytes == (1 << 30) - 8 * 2_000_000
        for store in stores:
            await store.close()


async def test_what_a_feed_shows_counts_once_a_moment_later() -> None:
    store = MemoryStore(SYSTEM_CLOCK)
    one, other = Placing(store), Placing(store)
    async with running(one, other):
        await _heard_by_all([one, other])
        where = one.place("r1")
        load = _load(other, where)
        await eventually(lambda: load().sent_tokens == 2000, within_s=20)
        for gateway in (one, other):
            shown = p_engine(name=where.split("/")[1], queue_tokens=2000, waiting=1)
            gateway.hear(where, engines=(shown,), started=("r1",))
        await eventually(lambda: load().sent_tokens == 0, within_s=20)
        assert load().queue_tokens == 2000


async def test_a_rush_is_told_at_most_so_often_and_its_end_is() -> None:
    store = MemoryStore(SYSTEM_CLOCK)
    one, other = Placing(store, sent_interval_s=0.2), Placing(store)
    async with running(one, other):
        await _heard_by_all([one, other])
        before, began = one.told("told"), SYSTEM_CLOCK.now()
        for at in range(200):
            one.view.sent.add_local(f"r{at}", ENGINE, 10, 0.0)
            await asyncio.sleep(0)
        local = lambda: other.view.local(ENGINE, {}).load.sent_tokens  # noqa: E731
        await eventually(lambda: local() == 2000, within_s=20)
        assert one.told("told") - before <= 2 + (SYSTEM_CLOCK.now() - began) / 0.2


async def test_without_it_exchanges_tell() -> None:
    store = MemoryStore(SYSTEM_CLOCK)
    one, other = Placing(store, sent_interval_s=0), Placing(store, sent_interval_s=0)
    async with running(one, other):
        where = one.place("r1")
        for gateway in (one, other):
            await gateway.sync.exchange()
        assert _load(other, where)().sent_tokens == 2000
    assert one.told("told") == 0


class Silent(MemoryStore):
    """Exchanges work; nothing between them does, while `why` says so."""

    why = "Redis: NoPermissionError: no permissions"

    async def tell_sent(self, sent: Sent) -> None:
        if self.why:
            raise StateUnavailable(self.why)
        await super().tell_sent(sent)

    async def hear_sent(self, take: Callable[[Sent], None]) -> None:
        if self.why:
            raise StateUnavailable(self.why)
        await super().hear_sent(take)


async def test_a_store_that_only_exchanges_is_said_once_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Silent(SYSTEM_CLOCK)
    one, other = Placing(store), Placing(store)
    with caplog.at_level(logging.WARNING):
        async with running(one, other):
            where = one.place("r1")
            await eventually(lambda: one.told("failed") >= 1, within_s=20)
            for gateway in (one, other):
                await gateway.sync.exchange()
            assert _load(other, where)().sent_tokens == 2000
            store.why = ""
            await _heard_by_all([one, other])
    said = [record for record in caplog.records if "with each exchange only" in record.message]
    assert len(said) == 2, "one of each gateway"


def _redis(server: RedisServer) -> RedisStore:
    return RedisStore(StateSettings(redis=server.url(), timeout_s=10.0))


def _load(gateway: Placing, where: str) -> Callable[[], Any]:
    def load() -> Any:
        remotes = gateway.view.snapshot(ENGINE, {}).remotes
        return next(r.load for r in remotes if f"{r.peer}/{r.instance}" == where)

    return load


async def _heard_by_all(made: list[Placing]) -> None:
    """Until each has heard something of each other one."""
    number = 0
    while any(one.told("heard") < len(made) - 1 for one in made):
        for one in made:
            number += 1
            one.view.sent.add_local(f"warm{number}", ENGINE, 1, 0.0)
            await asyncio.sleep(0.05)
            one.view.sent.finish(f"warm{number}")
    for one in made:
        others = [each for each in made if each is not one]
        await eventually(
            lambda others=others: all(
                not each.view.local(ENGINE, {}).load.sent_tokens for each in others
            ),
            within_s=20,
        )
