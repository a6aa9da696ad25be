"""A watcher that applies full state and deltas always ends up with what the agent knows."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.hashing import BlockHash
from prfaas.limits import Limits
from prfaas.snapshot import Outcome
from prfaas.telemetry import EngineInfo, LinkInfo, WatchUpdate
from remote_prefill import watch as watch_module
from remote_prefill.watch import Watcher, WatchFeed


def name(number: int) -> BlockHash:
    return number.to_bytes(16, "big")


def feed(**changes: Any) -> WatchFeed:
    return WatchFeed("a", Limits(**changes), lambda: (LinkInfo("p", "i"),))


class Gateway:
    """Applies updates as a gateway must."""

    def __init__(self) -> None:
        self.seq = 0
        self.engine: EngineInfo | None = None
        self.index: set[BlockHash] | None = None
        self.epoch = ""
        self.outcomes: list[str] = []
        self.started: list[str] = []

    def apply(self, update: WatchUpdate) -> None:
        assert update.seq == self.seq + 1
        self.seq = update.seq
        if update.full:
            self.engine = self.index = None
        for engine in update.engines:
            self.engine = engine
        for delta in update.kv:
            if delta.cleared:
                self.index = set()
            assert self.index is not None
            assert not set(delta.stored) & set(delta.removed)
            self.epoch = delta.epoch
            self.index -= set(delta.removed)
            self.index |= set(delta.stored)
        self.outcomes += [o.transfer_id for o in update.outcomes]
        self.started += update.started


@settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_a_watcher_of_any_pace_ends_up_with_the_truth(seed: int) -> None:
    rng = random.Random(seed)
    where, gateway = feed(), Gateway()
    watcher = Watcher(where)
    where._watchers.add(watcher)
    epoch = 0
    for _ in range(80):
        action = rng.random()
        if action < 0.1 or (where.index is None and action < 0.5):
            epoch += 1
            where.set_index("e", f"epoch-{epoch}", {name(rng.randrange(30)) for _ in range(9)})
        elif action < 0.15:
            where.forget_index()
        elif action < 0.7 and where.index is not None:
            stored = {name(rng.randrange(30)) for _ in range(rng.randrange(4))}
            removed = {name(rng.randrange(30)) for _ in range(rng.randrange(4))}
            where.change_index(stored, removed)
        elif action < 0.8:
            where.set_engine(EngineInfo("e", queue_tokens=rng.randrange(3)))
        else:
            gateway.apply(watcher.take())
    while True:
        gateway.apply(watcher.take())
        if not (watcher._full or watcher._stored or watcher._removed or watcher._cleared):
            break
    assert gateway.engine == where.engine
    assert gateway.index == (where.index.hashes if where.index else None)
    if where.index is not None and gateway.index:
        assert gateway.epoch == where.index.epoch


async def updates(where: WatchFeed, count: int) -> list[WatchUpdate]:
    found: list[WatchUpdate] = []
    async with aclosing(where.watch()) as stream:
        async for update in stream:
            found.append(update)
            if len(found) == count:
                break
    return found


async def test_the_first_event_has_everything_and_others_come_in_time_though_empty() -> None:
    where = feed(watch_interval_s=0.02)
    where.set_engine(EngineInfo("e", ready=True))
    where.set_index("e", "x", [name(1)])
    where.start("t0")
    where.finish(Outcome("t9", "staged"))
    loop = asyncio.get_running_loop()
    begin = loop.time()
    first, second, third = await updates(where, 3)
    assert loop.time() - begin < 0.2
    assert (first.full, first.seq, first.agent) == (True, 1, "a")
    assert first.engines == (EngineInfo("e", ready=True),)
    assert [(d.cleared, d.stored) for d in first.kv] == [(True, (name(1),))]
    assert (first.started, [o.transfer_id for o in first.outcomes]) == (("t0",), ["t9"])
    for update, seq in ((second, 2), (third, 3)):
        assert (update.seq, update.full) == (seq, False)
        assert (update.engines, update.kv, update.outcomes, update.started) == ((), (), (), ())
        assert update.links == (LinkInfo("p", "i"),)
    assert not where._watchers


async def test_an_engine_without_events_has_an_unknown_cache_and_an_empty_one_is_known() -> None:
    where = feed()
    (update,) = await updates(where, 1)
    assert update.kv == ()
    where.set_index("e", "x", [])
    (update,) = await updates(where, 1)
    assert [(d.cleared, d.stored) for d in update.kv] == [(True, ())]


async def test_outcomes_and_starts_come_at_once_and_together() -> None:
    where = feed(watch_interval_s=0.5)
    async with aclosing(where.watch()) as stream:
        await anext(stream)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        where.start("t1")
        where.start("t2")
        where.finish(Outcome("t1", "staged"))
        update = await anext(stream)
        assert loop.time() - begin < 0.2
        assert update.started == ("t1", "t2")
        assert [o.transfer_id for o in update.outcomes] == ["t1"]
        assert list(where.active) == ["t2"]


def test_a_watcher_that_does_not_take_falls_back_to_full_state() -> None:
    where = feed(outcome_history=10)
    watcher = Watcher(where)
    where._watchers.add(watcher)
    watcher.take()
    for number in range(100):
        where.start(f"t{number}")
        where.finish(Outcome(f"t{number}", "staged"))
        assert len(watcher._started) + len(watcher._outcomes) <= 10
    update = watcher.take()
    assert update.full
    assert [o.transfer_id for o in update.outcomes] == [f"t{n}" for n in range(90, 100)]


def test_many_removals_fall_back_to_full_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "MAX_HASHES", 10)
    where = feed()
    where.set_index("e", "x", [name(n) for n in range(30)])
    watcher, gateway = Watcher(where), Gateway()
    where._watchers.add(watcher)
    sizes = []
    for _ in range(3):
        update = watcher.take()
        sizes += [len(d.stored) for d in update.kv]
        gateway.apply(update)
    assert sizes == [10, 10, 10]  # a large index comes in parts
    for number in range(20):
        where.change_index([], [name(number)])
        assert len(watcher._removed) <= 10
    update = watcher.take()
    assert update.full
    gateway.apply(update)
    assert gateway.index == {name(n) for n in range(20, 30)}


async def test_the_rest_of_a_large_index_does_not_wait_for_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_module, "MAX_HASHES", 2)
    where = feed(watch_interval_s=0.5)
    where.set_index("e", "x", [name(n) for n in range(7)])
    loop = asyncio.get_running_loop()
    begin = loop.time()
    found = await updates(where, 4)
    assert loop.time() - begin < 0.4
    assert sum(len(d.stored) for u in found for d in u.kv) == 7


def test_changes_before_the_index_is_known_are_an_error() -> None:
    with pytest.raises(ValueError, match="not known"):
        feed().change_index([name(1)], [])


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_feed_that_closes_tells_each_watcher_all_there_was(forgets: bool) -> None:
    source = feed(watch_interval_s=0.5)
    source.set_index("a", "e", [name(1)])
    seen: list[Gateway] = []

    async def follow(pause_s: float) -> None:
        gateway = Gateway()
        seen.append(gateway)
        async for update in source.watch():
            gateway.apply(update)
            await asyncio.sleep(pause_s)  # a slow one is in the middle of a write

    watchers = [asyncio.create_task(follow(pause_s)) for pause_s in (0.0, 0.05)]
    await asyncio.sleep(0.02)
    source.start("t")
    source.finish(Outcome("t", "staged"))
    if forgets:
        source.forget_index()  # as when the engine is cut: the full state is due then
    source.close()
    await asyncio.wait_for(asyncio.gather(*watchers), 2)
    assert [gateway.outcomes for gateway in seen] == [["t"], ["t"]]
