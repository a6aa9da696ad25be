"""Streams of agents that come and go, followed once for all workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec
import pytest

from gateway.members import Members
from gateway.workers import watching as watching_module
from gateway.workers.messages import MembersAre, ToWorker, Unfed
from gateway.workers.told_view import ToldView
from gateway.workers.watching import Watching
from prfaas.clock import SYSTEM_CLOCK
from prfaas.errors import ConfigError
from prfaas.settings import EngineEndpoint
from prfaas.testing.gateway_setup import d_engine, gateway_settings
from prfaas.testing.scripted_agent import ScriptedAgent, scripted_agent
from prfaas.testing.waiting import eventually

SETTINGS = gateway_settings()


@dataclass
class World:
    """Two agents, and what workers are told."""

    agents: list[ScriptedAgent]
    told: list[ToWorker]
    needed: set[str]
    view: ToldView
    watching: Watching

    def members(self, *numbers: int) -> Members:
        return Members(
            tuple(
                EngineEndpoint(
                    name=f"d-{at}", url="http://127.0.0.1:1", agent=self.agents[at].address
                )
                for at in numbers
            )
        )

    def heard(self) -> set[str]:
        return {place for place, feed in self.view.feeds.items() if feed.connected}


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(watching_module, "LOOK_S", 0.01)
    monkeypatch.setattr(watching_module, "LEFT_S", 0.05)
    async with AsyncExitStack() as stack:
        agents = [
            await stack.enter_async_context(scripted_agent(d_engine(name=f"d-{at}"), ()))
            for at in range(2)
        ]
        told: list[ToWorker] = []
        needed: set[str] = set()
        view = ToldView(SETTINGS.gateway, SETTINGS.limits, SYSTEM_CLOCK, told.append)
        watching = Watching(
            Members(),
            view,
            None,
            SETTINGS.limits,
            lambda: frozenset(needed),
            lambda members: told.append(MembersAre.of(members)),
        )
        made = World(agents, told, needed, view, watching)
        await watching.apply(made.members(0))
        task = asyncio.create_task(watching.run())
        yield made
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await watching.close()


async def test_members_are_told_before_anything_is_heard_of_them(world: World) -> None:
    await eventually(lambda: world.heard() == {"d-0"}, within_s=20)
    await world.watching.apply(world.members(0, 1))
    await eventually(lambda: world.heard() == {"d-0", "d-1"}, within_s=20)
    known: set[str] = set()
    for message in world.told:
        if isinstance(message, MembersAre):
            known = {engine.name for engine in message.members().engines}
        elif not isinstance(message, Unfed):
            assert message.place in known  # type: ignore[union-attr]


async def test_who_left_is_followed_while_a_worker_has_requests_there(world: World) -> None:
    await eventually(lambda: world.heard() == {"d-0"}, within_s=20)
    world.needed.add("d-0")
    await world.watching.apply(world.members(1))
    await eventually(lambda: world.heard() == {"d-0", "d-1"}, within_s=20)
    await asyncio.sleep(0.2)
    assert "d-0" in world.view.feeds, "a worker still needs it"
    world.needed.clear()
    await eventually(lambda: set(world.view.feeds) == {"d-1"}, within_s=20)


async def test_what_cannot_be_dialled_changes_nothing(world: World) -> None:
    await eventually(lambda: world.heard() == {"d-0"}, within_s=20)
    told = len([each for each in world.told if isinstance(each, MembersAre)])
    bad = Members((EngineEndpoint(name="x", url="http://127.0.0.1:1", agent="192.0.2.1:1"),))
    with pytest.raises(ConfigError):
        await world.watching.apply(bad)
    assert world.watching.members == world.members(0)
    assert len([each for each in world.told if isinstance(each, MembersAre)]) == told


def test_secrets_of_engines_reach_workers() -> None:
    endpoint = EngineEndpoint(
        name="x", url="http://127.0.0.1:1", api_key="a-key", apis=("embeddings",)
    )
    packed = msgspec.msgpack.encode(MembersAre.of(Members((endpoint,))))
    heard = msgspec.msgpack.decode(packed, type=MembersAre)
    assert heard.members().engines == (endpoint,)
