"""A page at one worker shows what all of them do."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.admission import Admission
from gateway.cluster_view import ClusterView
from gateway.dashboard import feed as feed_module
from gateway.dashboard.gather import Gatherer, Sources
from gateway.dashboard.messages import Requests, Together
from gateway.engines import Engines
from gateway.live_policy import LivePolicy
from gateway.metrics import GatewayMetrics
from gateway.records import RecordBook, RequestRecord
from gateway.workers import dashboard as dashboard_module
from gateway.workers.dashboard import DashboardPart, WorkersDashboard
from gateway.workers.place import Place
from gateway.workers.siblings import Ask, AskDashboard, Siblings
from policies.registry import make_policy
from prfaas.snapshot import Decision, Outcome, Reason, Target
from prfaas.testing.clock import ManualClock
from prfaas.testing.gateway_setup import ENGINE, PLACE, gateway_settings
from prfaas.testing.waiting import eventually

SETTINGS = gateway_settings()


def place_at(directory: Path, index: int) -> Place:
    return Place(index, 2, 0, directory, 0, -1, -1)


class OneWorker:
    """The parts of a worker that the dashboard looks at."""

    def __init__(self, place: Place) -> None:
        self.clock = ManualClock()
        limits = SETTINGS.limits
        self.view = ClusterView(SETTINGS.gateway, limits, self.clock)
        self.records = RecordBook(1000, self.clock)
        self.metrics = GatewayMetrics()
        self.admission = Admission(100)
        nobody: Any = None
        self.engines = Engines({ENGINE: nobody}, self.view, limits, self.clock, lambda _: None)
        policy = LivePolicy(
            SETTINGS.gateway, make_policy(SETTINGS.gateway.policy), make_policy, self.metrics
        )
        self.gatherer = Gatherer(
            Sources(
                SETTINGS.gateway,
                self.view,
                self.engines,
                self.records,
                self.metrics,
                policy,
                self.admission,
                self.clock,
                2.0,
            )
        )
        self.siblings = Siblings(place, self._said)
        self.dashboard = WorkersDashboard(self.gatherer, self.records, self.siblings)

    def _said(self, ask: Ask) -> object:
        assert isinstance(ask, AskDashboard)
        return self.dashboard.part(ask)

    def serve(self, name: str, ttft_s: float) -> RequestRecord:
        record = self.records.open(name, "chat", "trace", name)
        record.decision = Decision(Target.LOCAL, Reason.TOO_SHORT, uncached_tokens=10)
        record.first_event_at = record.started_at + ttft_s
        record.itl_s = [ttft_s / 10]
        self.metrics.decided(record.decision)
        self.clock.advance(0.001)
        return record


@pytest.fixture
async def two() -> AsyncIterator[tuple[OneWorker, OneWorker]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pw")))
        made = [OneWorker(place_at(folder, index)) for index in range(2)]
        for worker in made:
            await worker.siblings.start()
            stack.push_async_callback(worker.siblings.close)
        yield made[0], made[1]


async def test_what_each_has_of_its_own_adds_up(two: tuple[OneWorker, OneWorker]) -> None:
    one, other = two
    for at in range(3):
        one.serve(f"a{at}", 0.1)
    for at in range(5):
        other.serve(f"b{at}", 0.9)
    for worker in two:
        worker.admission.enter()
        worker.engines[ENGINE].in_flight = 2
        worker.metrics.outcome(Outcome("t", "staged", raw_bytes=100, wire_bytes=60))
    for _ in range(3):
        other.view.breakers.engines[ENGINE].failed()
        other.view.breakers.outcome(
            ENGINE,
            PLACE,
            Outcome("t", "local", reason="peer_unavailable", tried=(PLACE,)),
        )
    await one.dashboard.look(first=True, whole=True)
    state = one.dashboard.state()
    assert state.in_flight == 2
    assert state.decided == 8
    assert state.reasons == [("local", "too_short", 8)]
    assert (state.share.requests, state.share.tokens) == (8, 80)
    assert (state.saved.raw_bytes, state.saved.wire_bytes) == (200, 120)
    assert state.latency["local"].requests == 8
    assert state.latency["local"].ttft_s == pytest.approx((0.9, 0.9, 0.9))
    (engine,) = state.engines
    assert (engine.in_flight, engine.breaker, engine.openings) == (4, "open", 1)
    assert state.links[0].breaker == "open"
    assert state.together is None
    assert one.dashboard.state().decided == 8, "the same however often it is looked at"


async def test_requests_of_all_are_shown_in_their_order_and_once(
    two: tuple[OneWorker, OneWorker],
) -> None:
    one, other = two
    one.serve("a", 0.1)
    second = other.serve("b", 0.1)
    second.started_wall += 1
    await one.dashboard.look(first=True, whole=True)
    assert [each.id for each in one.dashboard.begin().requests] == ["a", "b"]
    one.dashboard.skip()
    one.dashboard.changed()
    await one.dashboard.look(first=False, whole=False)
    assert one.dashboard.changed().requests == []
    second.status = "200"
    await one.dashboard.look(first=False, whole=False)
    assert [(each.id, each.status) for each in one.dashboard.changed().requests] == [("b", "200")]
    shown = one.dashboard.begin().requests
    assert [(each.id, each.status) for each in shown] == [("a", ""), ("b", "200")]


async def test_a_worker_that_is_gone_is_not_shown_and_the_others_are(
    two: tuple[OneWorker, OneWorker],
) -> None:
    one, other = two
    one.serve("a", 0.1)
    other.serve("b", 0.1)
    await one.dashboard.look(first=True, whole=True)
    assert one.dashboard.state().decided == 2
    await one.dashboard.look(first=False, whole=False)
    assert one.dashboard.state().decided == 2, "what was heard before is still shown"
    await other.siblings.close()
    await one.dashboard.look(first=False, whole=True)
    assert one.dashboard.state().decided == 1


async def test_how_it_stands_with_other_gateways_is_said_by_the_state(
    two: tuple[OneWorker, OneWorker],
) -> None:
    one, _ = two
    directory = one.siblings._place.directory
    part = DashboardPart(Requests([]), together=Together(True, 4, 0.1))
    state = Siblings(place_at(directory, -1), lambda ask: part)
    await state.start()
    await one.dashboard.look(first=True, whole=True)
    assert one.dashboard.state().together == Together(True, 4, 0.1)
    await state.close()
    await one.dashboard.look(first=False, whole=True)
    found = one.dashboard.state().together
    assert found is not None
    assert (found.up, found.gateways) == (False, 4)


async def test_nobody_is_asked_while_nobody_looks(
    two: tuple[OneWorker, OneWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_module, "TICK_S", 0.005)
    monkeypatch.setattr(feed_module, "TICK_S", 0.005)
    one, other = two
    asked = 0
    part = other.dashboard.part

    def counted(ask: AskDashboard) -> DashboardPart:
        nonlocal asked
        asked += 1
        return part(ask)

    monkeypatch.setattr(other.dashboard, "part", counted)
    looks = False
    task = asyncio.create_task(one.dashboard.run(lambda: looks))
    await asyncio.sleep(0.05)
    assert asked == 0
    looks = True
    await eventually(lambda: asked > 2)
    looks = False
    await eventually(lambda: not one.dashboard._parts)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
