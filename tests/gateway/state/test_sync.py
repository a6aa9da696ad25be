"""The loop between gateways, in virtual time: what is shared, and what an outage changes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.cluster_view import ClusterView
from gateway.state.memory import MemoryStore
from gateway.state.metrics import StateMetrics
from gateway.state.sync import StateSync
from gateway.tenancy.quotas import TOKENS, Quotas
from prfaas.cluster_state import Report, Sent, Shared
from prfaas.errors import RateLimited, StateUnavailable
from prfaas.settings import StateSettings
from prfaas.telemetry import WatchUpdate
from prfaas.tenants import Tenant
from prfaas.testing.clock import ManualClock
from prfaas.testing.gateway_setup import ENGINE, gateway_settings, link

MINUTE_TOKENS = 6000
TICK_S = 0.1


class FlakyStore:
    """A store that can be away: `lost` says whether the report arrives all the same."""

    def __init__(self, clock: ManualClock) -> None:
        self.memory = MemoryStore(clock)
        self.away = False
        self.lost = False

    async def exchange(self, report: Report) -> Shared:
        if self.away:
            if self.lost:
                await self.memory.exchange(report)
            raise StateUnavailable("Redis: ConnectionError")
        return await self.memory.exchange(report)

    async def tell_sent(self, sent: Sent) -> None:
        if self.away:
            raise StateUnavailable("Redis: ConnectionError")
        await self.memory.tell_sent(sent)

    async def hear_sent(self, take: Callable[[Sent], None]) -> None:
        if self.away:
            raise StateUnavailable("Redis: ConnectionError")
        await self.memory.hear_sent(take)

    async def leave(self, member_id: str) -> None:
        if self.away:
            raise StateUnavailable("Redis: ConnectionError")
        await self.memory.leave(member_id)

    async def close(self) -> None:
        pass


class Policies:
    """Takes part in the exchange of policies."""

    def __init__(self) -> None:
        self.mine: str | None = None
        self.adopted: list[str] = []

    def published(self) -> str | None:
        text, self.mine = self.mine, None
        return text

    async def adopt(self, text: str) -> None:
        self.adopted.append(text)


class OneGateway:
    """The parts of one that take part."""

    def __init__(self, store: FlakyStore, clock: ManualClock, tenant: Tenant) -> None:
        settings = gateway_settings()
        self.clock = clock
        self.tenant = tenant
        self.view = ClusterView(settings.gateway, settings.limits, clock)
        self.quotas = Quotas()
        self.quotas.take_tenants([tenant], clock.now())
        self.policies = Policies()
        self.registry = CollectorRegistry()
        self.sync = StateSync(
            StateSettings(interval_s=TICK_S),
            store,
            self.view,
            self.quotas,
            lambda: [tenant],
            self.policies,
            StateMetrics(self.registry),
            clock,
        )

    def use(self, tokens: int) -> int:
        """How many of them were let through."""
        try:
            self.quotas.take_tokens(self.tenant, tokens, self.clock.now())
        except RateLimited:
            return 0
        return tokens

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"prfaas_gateway_state_{name}", labels)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> FlakyStore:
    return FlakyStore(clock)


def gateways(store: FlakyStore, clock: ManualClock, count: int, **bounds: Any) -> list[OneGateway]:
    tenant = Tenant(name="acme", **{"tokens_per_minute": MINUTE_TOKENS, **bounds})
    return [OneGateway(store, clock, tenant) for _ in range(count)]


async def run(
    made: list[OneGateway], seconds: float, load: Iterator[tuple[int, int]], *, per_tick: int = 10
) -> int:
    """Tokens let through by all, where requests come one after the other and each gateway exchanges
    once in a tick, at a moment of its own.
    """
    clock = made[0].clock
    passed = 0
    slots = max(per_tick, len(made))
    for tick in range(round(seconds / TICK_S)):
        for slot in range(slots):
            clock.advance(TICK_S / slots)
            at, cost = next(load)
            passed += made[at % len(made)].use(cost)
            for number, gateway in enumerate(made):
                if slot == (number * 7 + tick) % slots:
                    await gateway.sync.exchange()
    return passed


def loads(seed: int, weights: list[int], largest: int) -> Iterator[tuple[int, int]]:
    """Which gateway, and how many tokens: more than the budget lets through."""
    chance = random.Random(seed)
    while True:
        (at,) = chance.choices(range(len(weights)), weights)
        yield at, chance.randint(1, largest)


@pytest.mark.parametrize(
    ("weights", "largest"),
    [([1, 1], 20), ([1, 1], 500), ([9, 1], 50), ([1, 0], 500), ([1] * 5, 50), ([3, 2, 1], 500)],
    ids=str,
)
async def test_all_gateways_together_keep_to_one_budget(
    store: FlakyStore, clock: ManualClock, weights: list[int], largest: int
) -> None:
    made = gateways(store, clock, len(weights))
    for gateway in made:
        await gateway.sync.exchange()
    seconds = 90.0
    passed = await run(made, seconds, loads(1, weights, largest))
    allowed = MINUTE_TOKENS + MINUTE_TOKENS / 60 * seconds
    assert passed <= allowed * 1.02 + largest
    assert passed >= allowed * 0.95 - largest, "and what is theirs they get"


async def test_the_first_moments_are_not_free_for_each(
    store: FlakyStore, clock: ManualClock
) -> None:
    made = gateways(store, clock, 3)
    passed = await run(made, 5.0, loads(2, [1, 1, 1], 50), per_tick=30)
    # Each began with half of it, for it had been told to expect two; that is paid back.
    assert passed <= MINUTE_TOKENS * 1.5 + 500
    passed += await run(made, 115.0, loads(3, [1, 1, 1], 50))
    assert passed <= MINUTE_TOKENS * 3 * 1.02 + 50


@pytest.mark.parametrize("lost", [False, True])
async def test_while_the_store_is_away_each_keeps_to_its_share(
    store: FlakyStore, clock: ManualClock, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made = gateways(store, clock, 2)
    load = loads(4, [1, 1], 50)
    before = await run(made, 120.0, load)
    store.away, store.lost = True, lost
    during = await run(made, 60.0, load)
    assert MINUTE_TOKENS * 0.9 <= during <= MINUTE_TOKENS * 1.02
    assert [gateway.value("up") for gateway in made] == [0, 0]
    assert made[0].value("age_seconds") == pytest.approx(60, abs=1)
    assert caplog.text.count("the shared state is away") == 2, "each says so once"

    store.away = False
    after = await run(made, 120.0, load)
    allowed = MINUTE_TOKENS * 6
    assert before + during + after <= allowed * 1.02
    assert [gateway.value("up") for gateway in made] == [1, 1]
    assert caplog.text.count("in touch with") == 4


async def test_one_that_bears_all_the_load_gets_less_without_the_store(
    store: FlakyStore, clock: ManualClock
) -> None:
    made = gateways(store, clock, 2)
    load = loads(5, [1, 0], 50)
    assert await run(made, 120.0, load) >= MINUTE_TOKENS * 2.9
    store.away = True
    assert await run(made, 60.0, load) <= MINUTE_TOKENS * 0.52


async def test_who_never_hears_anything_lives_on_the_share_it_was_told_to_expect(
    store: FlakyStore, clock: ManualClock
) -> None:
    store.away = True
    (one,) = gateways(store, clock, 1)
    passed = await run([one], 60.0, loads(6, [1], 50))
    assert passed <= MINUTE_TOKENS * 2 / 2 * 1.02
    assert one.value("gateways") == 2
    assert one.value("exchanges_total", result="failed") == 600


async def test_a_store_that_lost_everything_is_told_again(
    store: FlakyStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    made = gateways(store, clock, 2)
    load = loads(7, [1, 1], 50)
    made[0].policies.mine = "policy: one"
    passed = await run(made, 60.0, load)
    assert made[1].policies.adopted == ["policy: one"]
    for _ in range(3):
        store.memory.forget()
        passed += await run(made, 60.0, load)
    assert passed <= MINUTE_TOKENS * 5 * 1.03
    assert made[0].value("losses_total") == 3
    assert "was lost" in caplog.text
    late = OneGateway(store, clock, made[0].tenant)
    await late.sync.exchange()
    assert late.policies.adopted == ["policy: one"]
    assert made[0].policies.adopted == []


async def test_requests_in_flight_are_counted_over_all(
    store: FlakyStore, clock: ManualClock
) -> None:
    made = gateways(store, clock, 2, concurrent_requests=10)

    def fill(gateway: OneGateway) -> int:
        entered = 0
        while True:
            try:
                gateway.quotas.enter(gateway.tenant, clock.now())
            except RateLimited:
                return entered
            entered += 1

    async def tick() -> None:
        clock.advance(TICK_S)
        for gateway in made:
            await gateway.sync.exchange()

    await tick()
    await tick()
    assert [fill(gateway) for gateway in made] == [5, 5], "each its share, where all begin at once"
    for _ in range(3):
        await tick()
        assert [fill(gateway) for gateway in made] == [0, 0]
    for _ in range(5):
        made[0].quotas.leave(made[0].tenant)
    entered = 0
    for _ in range(30):
        await tick()
        entered += fill(made[1])
    assert entered == 5, "all of it, where the other asks for none"
    store.away = True
    for _ in range(20):
        await tick()
    made[1].quotas.leave(made[1].tenant)
    assert fill(made[0]) == 5, "its share, and no more"


@pytest.mark.parametrize("most", [2, 5, 40])
async def test_no_more_are_in_flight_than_may_be_while_all_ask_all_the_time(
    store: FlakyStore, clock: ManualClock, most: int
) -> None:
    made = gateways(store, clock, 3, concurrent_requests=most)
    chance = random.Random(most)
    for gateway in made * 2:
        await gateway.sync.exchange()
    peak = total = 0
    for step in range(3000):
        clock.advance(0.01)
        gateway = made[chance.randrange(3)]
        try:
            gateway.quotas.enter(gateway.tenant, clock.now())
        except RateLimited:
            pass
        busy = made[chance.randrange(3)]
        if chance.random() < 0.3 and busy.quotas.in_flight("acme"):
            busy.quotas.leave(busy.tenant)
        if step % 3 == 0:
            await made[chance.randrange(3)].sync.exchange()
        in_flight = sum(each.quotas.in_flight("acme") for each in made)
        peak = max(peak, in_flight)
        total += in_flight
    assert peak <= most + 2, "one for each other gateway, where all begin at once"
    assert total / 3000 >= 0.6 * most


async def test_who_asks_for_one_after_the_other_is_never_refused(
    store: FlakyStore, clock: ManualClock
) -> None:
    made = gateways(store, clock, 2, concurrent_requests=4)
    for step in range(100):
        clock.advance(0.03)
        made[0].quotas.enter(made[0].tenant, clock.now())
        made[0].quotas.leave(made[0].tenant)
        await made[step % 2].sync.exchange()


async def test_cancelling_ends_the_loop_also_where_a_client_keeps_it_to_itself(
    store: FlakyStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = asyncio.Event()

    async def swallowing(report: Report) -> Shared:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        raise StateUnavailable("cancelled")

    monkeypatch.setattr(store, "exchange", swallowing)
    (one,) = gateways(store, clock, 1)
    task = asyncio.create_task(one.sync.run())
    await entered.wait()
    task.cancel()
    await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 30)
    assert task.done()


async def test_one_request_at_a_time_is_possible_at_any_gateway(
    store: FlakyStore, clock: ManualClock
) -> None:
    made = gateways(store, clock, 3, concurrent_requests=1)
    for gateway in made * 2:
        await gateway.sync.exchange()
    for gateway in made:
        gateway.quotas.enter(gateway.tenant, clock.now())
        gateway.quotas.leave(gateway.tenant)


async def test_loads_and_links_of_others_are_part_of_a_snapshot(
    store: FlakyStore, clock: ManualClock
) -> None:
    one, other = gateways(store, clock, 2)
    one.view.update(ENGINE, WatchUpdate(1, agent="d", full=True, links=(link(),)))
    one.view.sent.add_local("r1", ENGINE, 500, clock.now())
    one.view.sent.add_remote("r2", ENGINE, "p/p-0", 700, 10, 5)
    for gateway in (one, other):
        await gateway.sync.exchange()
    clock.advance(0.5)
    snapshot = other.view.snapshot(ENGINE, {})
    load = snapshot.local.load
    assert (load.sent_tokens, load.sent_requests) >= (500, 1)
    remote = snapshot.remotes[0]
    assert (remote.load.sent_tokens, remote.load.sent_requests) == (700, 1)
    assert remote.link.goodput_bytes_per_s == 50e6
    assert remote.link.age_s == pytest.approx(0.5)
    assert not remote.ready, "a link that is not ours to use stays unusable"

    one.view.sent.finish("r1")
    one.view.sent.finish("r2")
    for gateway in (one, other):
        await gateway.sync.exchange()
    assert other.view.snapshot(ENGINE, {}).local.load.sent_tokens == 0

    one.view.sent.add_local("r3", ENGINE, 500, clock.now())
    for gateway in (one, other):
        await gateway.sync.exchange()
    store.away = True
    for _ in range(10):
        clock.advance(1.0)
        await other.sync.exchange()
    assert other.view.snapshot(ENGINE, {}).local.load.sent_tokens == 0, "too old to be true"


async def test_who_leaves_tells_the_last_and_is_gone(store: FlakyStore, clock: ManualClock) -> None:
    one, other = gateways(store, clock, 2)
    for gateway in (one, other, one):
        await gateway.sync.exchange()
    assert one.value("gateways") == 2
    assert other.use(1000) == 1000
    await other.sync.close()
    await one.sync.exchange()
    assert one.value("gateways") == 1
    level = one.quotas.level("acme", TOKENS, clock.now())
    assert level == pytest.approx(MINUTE_TOKENS - 1000, abs=1)


async def test_leaving_does_not_need_the_store(
    store: FlakyStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    (one,) = gateways(store, clock, 1)
    store.away = True
    await one.sync.close()
    assert "not told that this gateway is gone" in caplog.text
