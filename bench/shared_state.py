"""What sharing a Redis adds to a decision.

One process, turn by turn: a gateway's door, snapshot and policy with a loop that exchanges with a
redis-server of its own, and the same without. Both take a thousand decisions in a turn.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from gateway.cluster_view import ClusterView
from gateway.state.metrics import StateMetrics
from gateway.state.redis_store import RedisStore
from gateway.state.sync import StateSync
from gateway.tenancy.quotas import Quotas
from policies.registry import make_policy
from prfaas.clock import SYSTEM_CLOCK
from prfaas.settings import PolicySettings, StateSettings
from prfaas.telemetry import WatchUpdate
from prfaas.tenants import Tenant
from prfaas.testing.contracts import long_request
from prfaas.testing.gateway_setup import ENGINE, d_engine, gateway_settings, link, p_engine
from prfaas.testing.redis_server import redis_server

TURNS = 20
DECISIONS = 1000
TENANT = Tenant(
    name="acme", requests_per_minute=1e9, tokens_per_minute=1e12, concurrent_requests=100
)


class Decider:
    """The parts that one decision goes through."""

    def __init__(self) -> None:
        settings = gateway_settings()
        self.view = ClusterView(settings.gateway, settings.limits, SYSTEM_CLOCK)
        self.quotas = Quotas()
        self.quotas.take_tenants([TENANT], SYSTEM_CLOCK.now())
        self._policy = make_policy(PolicySettings())
        self._state = self._policy.initial_state()
        update = WatchUpdate(1, agent="d", full=True, engines=(d_engine(),), links=(link(),))
        self.view.update(ENGINE, update)
        self.view.update("p/p-0", WatchUpdate(1, agent="p", full=True, engines=(p_engine(),)))

    def decide(self) -> None:
        now = SYSTEM_CLOCK.now()
        self.quotas.enter(TENANT, now)
        self.quotas.take_tokens(TENANT, 1000, now)
        snapshot = self.view.snapshot(ENGINE, {})
        self._policy.decide(long_request(), snapshot, self._state)
        self.quotas.leave(TENANT)


async def turn(decider: Decider) -> list[float]:
    """Microseconds of each decision; the loop has its chance after each."""
    took = []
    for _ in range(DECISIONS):
        began = time.perf_counter_ns()
        decider.decide()
        took.append((time.perf_counter_ns() - began) / 1e3)
        await asyncio.sleep(0)
    return took


async def measure(directory: Path) -> tuple[list[float], list[float], int]:
    """Microseconds of each decision in memory and with Redis, and how many exchanges there were."""
    alone, shared = Decider(), Decider()
    async with redis_server(directory) as server:
        settings = StateSettings(redis=server.url())
        store = RedisStore(settings)
        registry = CollectorRegistry()
        sync = StateSync(
            settings, store, shared.view, shared.quotas, lambda: [TENANT], None,
            StateMetrics(registry), SYSTEM_CLOCK,
        )  # fmt: skip
        in_memory: list[float] = []
        with_redis: list[float] = []
        for _ in range(TURNS):
            in_memory += await turn(alone)
            loop = asyncio.create_task(sync.run())
            with_redis += await turn(shared)
            await asyncio.sleep(2 * settings.interval_s)
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
        await sync.close()
        done = registry.get_sample_value("prfaas_gateway_state_exchanges_total", {"result": "ok"})
    return in_memory, with_redis, int(done or 0)
