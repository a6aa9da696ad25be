"""Workers of several hosts live on one budget: each host is one member of the store beyond."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from gateway.cluster_view import ClusterView
from gateway.neighbours import Neighbours
from gateway.sent import Unshown
from gateway.state.memory import MemoryStore
from gateway.state.metrics import StateMetrics
from gateway.state.sync import StateSync
from gateway.tenancy.quotas import TOKENS, Quotas
from gateway.workers.hub_store import HubPrefixes, HubStore, WorkersSent
from prfaas.cluster_state import (
    ClusterStore,
    Load,
    Member,
    PrefixDelta,
    Report,
    Shared,
)
from prfaas.errors import RateLimited, StateUnavailable
from prfaas.settings import StateSettings
from prfaas.tenants import Tenant
from prfaas.testing.clock import ManualClock
from prfaas.testing.gateway_setup import ENGINE, gateway_settings
from prfaas.testing.state_contract import ClusterStateContract
from prfaas.testing.waiting import eventually

MINUTE_TOKENS = 6000
WORKER_TICK_S, HOST_TICK_S = 0.02, 0.1
SETTINGS = gateway_settings()


class TestHubStoreAlone(ClusterStateContract):
    """Without a store beyond it is one as any other."""

    clock = ManualClock()

    @pytest.fixture
    async def store(self) -> ClusterStore:
        return HubStore(self.clock, 2, Neighbours(), beyond=False)

    async def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def forget(self, store: ClusterStore) -> None:
        assert isinstance(store, HubStore)
        store.forget()


class Beyond(MemoryStore):
    """A store beyond, that can be away."""

    away = False

    async def exchange(self, report: Report) -> Shared:
        if self.away:
            raise StateUnavailable("Redis: ConnectionError")
        return await super().exchange(report)


class OneWorker:
    """The parts of one worker that take part."""

    def __init__(self, hub: HubStore, clock: ManualClock, tenant: Tenant, workers: int) -> None:
        self.clock, self.tenant = clock, tenant
        self.view = ClusterView(SETTINGS.gateway, SETTINGS.limits, clock)
        self.quotas = Quotas()
        self.quotas.take_tenants([tenant], clock.now())
        self.sync = StateSync(
            StateSettings(interval_s=WORKER_TICK_S, expected_gateways=workers),
            hub,
            self.view,
            self.quotas,
            lambda: [tenant],
            None,
            StateMetrics(CollectorRegistry()),
            clock,
        )

    def use(self, tokens: int) -> int:
        try:
            self.quotas.take_tokens(self.tenant, tokens, self.clock.now())
        except RateLimited:
            return 0
        return tokens

    def begin(self) -> bool:
        try:
            self.quotas.enter(self.tenant, self.clock.now())
        except RateLimited:
            return False
        return True


@dataclass
class Host:
    """One process that keeps the state, and its workers."""

    store: Beyond
    clock: ManualClock
    tenant: Tenant
    count: int
    workers: list[OneWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.view = ClusterView(SETTINGS.gateway, SETTINGS.limits, self.clock)
        self.hub = HubStore(self.clock, self.count, self.view.neighbours, beyond=True)
        self.view.sent = WorkersSent(self.hub)
        self.registry = CollectorRegistry()
        self.sync = StateSync(
            StateSettings(interval_s=HOST_TICK_S, expected_gateways=2 * self.count),
            self.store,
            self.view,
            self.hub,
            tuple,
            None,
            StateMetrics(self.registry),
            self.clock,
            HubPrefixes(self.hub),
            self.count,
        )
        self.sync.sent.pass_on = self.hub.pass_on
        self.workers = [
            OneWorker(self.hub, self.clock, self.tenant, self.count) for _ in range(self.count)
        ]


@dataclass
class World:
    """Hosts at one store."""

    clock: ManualClock
    store: Beyond
    hosts: list[Host]

    @property
    def workers(self) -> list[OneWorker]:
        return [worker for host in self.hosts for worker in host.workers]

    async def settle(self) -> None:
        """All have heard of all."""
        for _ in range(10):
            self.clock.advance(WORKER_TICK_S)
            for worker in self.workers:
                await worker.sync.exchange()
            for host in self.hosts:
                await host.sync.exchange()

    async def run(self, seconds: float, weights: list[int], largest: int, seed: int) -> int:
        """Tokens that all let through together, where more is asked for than there is."""
        random_ = random.Random(seed)
        passed, ticks = 0, round(seconds / WORKER_TICK_S)
        rate = MINUTE_TOKENS / 60
        owed = 0.0
        for tick in range(ticks):
            self.clock.advance(WORKER_TICK_S)
            owed += 3 * rate * WORKER_TICK_S
            while owed > 0:
                cost = random_.randint(1, largest)
                owed -= cost
                worker = random_.choices(self.workers, weights)[0]
                passed += worker.use(cost)
            for worker in self.workers:
                await worker.sync.exchange()
            for number, host in enumerate(self.hosts):
                if (tick + number) % round(HOST_TICK_S / WORKER_TICK_S) == 0:
                    await host.sync.exchange()
        return passed


@pytest.fixture
def world() -> World:
    return make_world()


def make_world(hosts: int = 2, workers: int = 2, **bounds: int) -> World:
    clock = ManualClock()
    tenant = Tenant(name="acme", **{"tokens_per_minute": MINUTE_TOKENS, **bounds})  # type: ignore[arg-type]
    store = Beyond(clock)
    return World(clock, store, [Host(store, clock, tenant, workers) for _ in range(hosts)])


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [6, 1, 1, 1], [1, 1, 0, 0]])
async def test_all_workers_of_all_hosts_live_on_one_budget(
    world: World, weights: list[int]
) -> None:
    await world.settle()
    await world.run(40, weights, 200, seed=1)  # what a full bucket gives beyond the rate is gone
    passed = await world.run(60, weights, 200, seed=2)
    assert 0.9 * MINUTE_TOKENS <= passed <= 1.02 * MINUTE_TOKENS + 200


async def test_a_host_that_hears_nobody_keeps_to_its_share(world: World) -> None:
    await world.settle()
    await world.run(40, [1, 1, 1, 1], 200, seed=1)
    world.store.away = True
    await world.run(5, [1, 1, 1, 1], 100, seed=2)
    passed = await world.run(60, [1, 1, 0, 0], 100, seed=3)
    half = MINUTE_TOKENS / 2
    assert 0.85 * half <= passed <= 1.03 * half + 100, "the other host may be using its half"
    both = await world.run(30, [1, 1, 1, 1], 100, seed=4)
    saved = half  # by the host that was idle
    assert both <= 1.03 * half + saved + 200
    assert [worker.sync.up for worker in world.workers] == [True] * 4, "workers hear their host"
    world.store.away = False
    await world.run(60, [1, 1, 1, 1], 200, seed=5)  # what was used meanwhile is paid back
    passed = await world.run(30, [1, 1, 1, 1], 200, seed=6)
    assert 0.9 * half <= passed <= 1.03 * half + 200


async def test_each_worker_has_a_share_and_a_host_as_many_as_it_has_workers() -> None:
    world = make_world(hosts=2, workers=3)
    await world.settle()
    assert [worker.sync.shares for worker in world.workers] == [6] * 6
    world.store.away = True
    for _ in range(80):
        world.clock.advance(HOST_TICK_S)
        for host in world.hosts:
            await host.sync.exchange()
        for worker in world.workers:
            await worker.sync.exchange()
    assert [worker.sync.shares for worker in world.workers] == [6] * 6, "gone, or not heard?"


async def test_requests_in_flight_are_bounded_over_all() -> None:
    world = make_world(concurrent_requests=8)
    await world.settle()
    begun = 0
    for _ in range(40):
        for worker in world.workers:
            begun += worker.begin()
        await world.settle()
    assert begun == 8


async def test_requests_in_flight_are_a_share_where_nobody_is_heard() -> None:
    world = make_world(concurrent_requests=8)
    await world.settle()
    world.store.away = True
    for _ in range(80):
        world.clock.advance(HOST_TICK_S)
        for host in world.hosts:
            await host.sync.exchange()
        for worker in world.workers:
            await worker.sync.exchange()
    host = world.hosts[0]
    begun = 0
    for _ in range(20):
        for worker in host.workers:
            begun += worker.begin()
            await worker.sync.exchange()
    assert begun == 4, "the other half is the other host's"


async def test_what_workers_sent_is_seen_by_those_of_other_hosts(world: World) -> None:
    here, there = world.hosts
    for worker in here.workers:
        worker.view.sent.add_local(f"k{id(worker)}", ENGINE, 100, world.clock.now())
    await world.settle()
    load = there.workers[0].view.local(ENGINE, {}).load
    assert (load.sent_tokens, load.sent_requests) == (200, 2)
    siblings = here.workers[0].view.local(ENGINE, {}).load
    assert (siblings.sent_tokens, siblings.sent_requests) == (200, 2), "its own, and one more"


async def test_levels_that_were_heard_before_any_worker_asked_are_kept(world: World) -> None:
    here = world.hosts[0]
    await world.settle()
    key = ("late", TOKENS)
    here.hub.take_levels({key: 10.0}, 4, world.clock.now())
    late = Tenant(name="late", tokens_per_minute=60)
    worker = here.workers[0]
    worker.quotas.take_tenants([late], world.clock.now())
    worker.quotas.settle_tokens(late, 1, world.clock.now())
    heard = await here.hub.exchange(
        Report(
            Member("w"),
            60.0,
            tuple(worker.quotas.report(world.clock.now(), everything=False)),
        )
    )
    assert heard.levels[key] == pytest.approx(9.0, abs=0.2)


async def test_prefixes_go_up_and_down_and_a_gap_is_seen(world: World) -> None:
    here, there = world.hosts
    delta = PrefixDelta(ENGINE, b"12345678")

    async def tell(host: Host, *deltas: PrefixDelta, since: int | None = 0) -> Shared:
        heard = host.hub
        return await heard.exchange(
            Report(Member("w"), 60.0, (), heard._epoch, 0, 0, None, deltas, since)
        )

    await tell(here, delta)
    await here.sync.exchange()
    await here.sync.exchange()
    await there.sync.exchange()
    heard = await tell(there)
    assert [batch.deltas for batch in heard.prefixes] == [(delta,)]
    assert not heard.prefixes_gap
    told = here.registry.get_sample_value(
        "prfaas_gateway_state_prefix_names_total", {"direction": "told"}
    )
    assert told == 1
    HubPrefixes(there.hub).reset()
    assert (await tell(there, since=heard.prefixes_seq)).prefixes_gap
    HubPrefixes(here.hub).tell_again()
    assert list(here.hub.pending) == [delta]


async def test_what_a_host_says_of_its_workers(world: World) -> None:
    host = world.hosts[0]
    for number in range(2):
        await host.hub.exchange(
            Report(Member(f"w{number}", claims={"acme": 2}, sent={ENGINE: Load(5, 1, 10, 7)}), 60.0)
        )
    assert host.hub.claims((), 0.0) == {"acme": 4}
    (total,) = host.view.sent.sums().values()
    assert (total.tokens, total.requests, total.raw_bytes, total.wire_bytes) == (10, 2, 20, 14)
    world.clock.advance(100)
    assert host.hub.claims((), 0.0) == {}


async def test_what_a_worker_has_just_sent_is_known_at_once_on_all_hosts() -> None:
    world = make_world()
    await world.settle()
    syncs = [each.sync for each in (*world.workers, *world.hosts)]
    tasks = [asyncio.create_task(sync.sent.run()) for sync in syncs]
    stores = [world.store, *(host.hub for host in world.hosts)]
    await eventually(lambda: all(len(store._listeners) == 2 for store in stores))
    try:
        first, *others = world.workers
        first.view.sent.add_remote("r1", ENGINE, "p/p-0", 500, 5000, 4000)
        for other in others:
            seen = other.view.neighbours
            await eventually(lambda seen=seen: seen.unshown("p/p-0", Unshown()).tokens == 500)
            assert seen.unshown(ENGINE, Unshown()).transfers == 1
        first.view.sent.finish("r1")
        for other in others:
            seen = other.view.neighbours
            await eventually(lambda seen=seen: seen.unshown("p/p-0", Unshown()) == Unshown())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
