"""Whose turn it is: priorities, shares, bounds, and nobody's turn is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from gateway.tenancy.fair_queue import FairQueue
from prfaas.errors import Overloaded, RateLimited
from prfaas.tenants import Tenant


def tenant(name: str, **fields: Any) -> Tenant:
    return Tenant(name=name, **fields)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Load:
    """Requests at a queue; `order` is who had a turn."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, who: Tenant, count: int = 1, cost: float = 100) -> None:
        self.tasks += [asyncio.create_task(self._one(who, cost)) for _ in range(count)]

    async def _one(self, who: Tenant, cost: float) -> None:
        await self.queue.enter(who, cost)
        self.order.append(who.name)

    async def serve(self, count: int) -> None:
        for _ in range(count):
            await settle()
            self.queue.leave()
        await settle()


async def busy_queue(**fields: Any) -> tuple[FairQueue, Load]:
    """One wide and taken, so that all others wait."""
    queue = FairQueue(1, **{"most_waiting": 100, "wait_s": 60.0, **fields})
    await queue.enter(tenant("first"), 1)
    return queue, Load(queue)


async def test_while_there_is_room_nobody_waits() -> None:
    queue = FairQueue(2, 1, 60.0)
    await queue.enter(tenant("a"), 1)
    await queue.enter(tenant("a"), 1)
    assert (queue.active, queue.waiting) == (2, 0)


async def test_without_a_width_nobody_ever_waits() -> None:
    queue = FairQueue(0, 1, 60.0)
    for _ in range(1000):
        await queue.enter(tenant("a"), 1)
    for _ in range(1000):
        queue.leave()
    assert queue.active == 0


async def test_one_who_floods_does_not_keep_others_waiting() -> None:
    _, load = await busy_queue()
    load.add(tenant("flood"), 50)
    await settle()
    load.add(tenant("small"), 5)
    await load.serve(12)
    assert load.order.count("small") >= 5
    for task in load.tasks:
        task.cancel()


async def test_weights_are_shares() -> None:
    _, load = await busy_queue()
    load.add(tenant("light", weight=1), 60)
    load.add(tenant("heavy", weight=3), 60)
    await load.serve(40)
    counts = Counter(load.order)
    assert 28 <= counts["heavy"] <= 32, counts
    for task in load.tasks:
        task.cancel()


async def test_shares_are_of_tokens_not_of_requests() -> None:
    _, load = await busy_queue()
    load.add(tenant("long"), 60, cost=400)
    load.add(tenant("short"), 60, cost=100)
    await load.serve(50)
    counts = Counter(load.order)
    assert 3.0 <= counts["short"] / counts["long"] <= 5.0, counts
    for task in load.tasks:
        task.cancel()


async def test_the_higher_priority_goes_first() -> None:
    _, load = await busy_queue()
    load.add(tenant("low"), 3)
    load.add(tenant("high", priority=5), 3)
    await load.serve(6)
    assert load.order == ["high"] * 3 + ["low"] * 3


async def test_one_tenant_holds_no_more_than_its_places() -> None:
    queue, load = await busy_queue(most_waiting=2)
    load.add(tenant("a"), 2)
    await settle()
    with pytest.raises(RateLimited, match="2 of its requests wait") as caught:
        await queue.enter(tenant("a"), 1)
    assert caught.value.param == "waiting"
    load.add(tenant("b"))
    await load.serve(3)
    assert sorted(load.order) == ["a", "a", "b"]


async def test_who_waits_too_long_is_told_and_forgotten() -> None:
    queue, _ = await busy_queue(wait_s=0.01)
    with pytest.raises(Overloaded, match=r"no turn came within 0.01 s") as caught:
        await queue.enter(tenant("a"), 1)
    assert caught.value.phase == "turn"
    assert (queue.active, queue.waiting) == (1, 0)
    queue.leave()
    assert queue.active == 0


async def test_who_leaves_takes_no_turn_along() -> None:
    queue, load = await busy_queue()
    load.add(tenant("gone"))
    load.add(tenant("here"))
    await settle()
    load.tasks[0].cancel()
    await load.serve(1)
    assert load.order == ["here"]
    queue.leave()
    assert (queue.active, queue.waiting) == (0, 0)


async def test_a_turn_that_comes_to_one_who_is_leaving_goes_on() -> None:
    queue, load = await busy_queue()
    load.add(tenant("gone"))
    load.add(tenant("here"))
    await settle()
    queue.leave()  # its turn is set, and it has not run yet
    load.tasks[0].cancel()
    await settle()
    assert load.order == ["here"]
    queue.leave()
    assert (queue.active, queue.waiting) == (0, 0)


async def test_an_idle_queue_remembers_nobody() -> None:
    queue, load = await busy_queue()
    for name in range(50):
        load.add(tenant(f"t{name}"))
    await load.serve(51)
    assert (queue.active, queue.waiting) == (0, 0)
    assert not queue._due
