"""More than paced engines can serve, in virtual time: the whole gateway but its sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.ids import Ids
from gateway.job import Inbound
from gateway.schema import Api
from gateway.trace import trace_of
from policies.registry import make_policy
from prfaas.errors import EngineUnavailable, PrefillUnavailable, PrfaasError, openai_body
from prfaas.limits import Limits
from prfaas.settings import Settings
from prfaas.snapshot import Outcome
from prfaas.telemetry import KvDelta, WatchUpdate
from prfaas.testing.gateway_setup import INSTANCE, KEY, MODEL, PEER, PLACE, d_engine, link, p_engine
from prfaas.testing.virtual_time import run_virtually, virtual_clock

SLOTS, SERVICE_S = 4, 1.0
GOOD_S = 4.0
"""An answer within this is worth something to its client."""
ANSWER = b'{"choices":[{"text":"hello"}]}'


class PacedEngine:
    """Computes `slots` prompts at once, each for a second; all others wait in it. A prompt whose KV
    comes from a peer takes no slot, while that peer is there.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = asyncio.Semaphore(slots)
        self.lost = self.peer_lost = False
        self.present = self.most = self.running = self.waiting_kv = 0
        self.transfers: list[str] = []

    @asynccontextmanager
    async def post(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[_Answer]:
        if self.lost:
            raise EngineUnavailable("gone", phase="connect")
        params = json.loads(body).get("kv_transfer_params")
        self.present += 1
        self.most = max(self.most, self.present)
        try:
            yield await self._answer(params)
        finally:
            self.present -= 1

    async def _answer(self, params: dict[str, Any] | None) -> _Answer:
        if params is not None:
            self.transfers.append(params["transfer_id"])
            if not self.peer_lost:
                self.waiting_kv += 1
                await asyncio.sleep(SERVICE_S)
                self.waiting_kv -= 1
                return _Answer(200, ANSWER)
            if params["on_failure"] == "reject":
                refusal = openai_body(PrefillUnavailable("the peer is lost", retry_after_s=1.0))
                return _Answer(503, json.dumps(refusal).encode(), {"retry-after": "1"})
        async with self._slots:
            self.running += 1
            await asyncio.sleep(SERVICE_S)
            self.running -= 1
        return _Answer(200, ANSWER)

    async def healthy(self, timeout_s: float) -> bool:
        return not self.lost


@dataclass
class _Answer:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    async def read(self, limit_bytes: int) -> bytes:
        return self.body


class NoSink:
    """Of a client that gets whole answers."""

    started = False


@dataclass
class Told:
    """What clients got: seconds and status of each, and whether a refusal said when to return."""

    answers: list[tuple[float, int]] = field(default_factory=list)
    mute: int = 0

    @property
    def good(self) -> int:
        return self.within(GOOD_S)

    def within(self, seconds: float) -> int:
        return sum(status == 200 and each <= seconds for each, status in self.answers)

    def times(self, status: int) -> list[float]:
        return [seconds for seconds, each in self.answers if each == status]


def gateway_of(
    engines: list[PacedEngine], *, peer: bool = False, agents: bool = False, **limits: Any
) -> Gateway:
    names = [f"d-{at}" for at in range(len(engines))]
    agent = "127.0.0.1:1" if peer or agents else None
    settings = Settings(
        limits=Limits(**limits),
        gateway={
            "model": MODEL,
            "engines": [
                {"name": name, "url": "http://127.0.0.1:1", "agent": agent} for name in names
            ],
            "peers": [{"peer": PEER, "instance": INSTANCE, "watch": "127.0.0.1:1"}] if peer else [],
            "transfer_key": KEY,
            "short_body_bytes": 50,
            "tokenize_check_every": 0,
            "policy": {"min_uncached_tokens": 1},
        },
    )
    gateway = Gateway(settings, make_policy(settings.gateway.policy), None, virtual_clock())
    for engine, paced in zip(gateway.engines, engines, strict=True):
        engine.upstream = paced  # type: ignore[assignment]
        engine.probe.reachable = True
    return gateway


async def ask(gateway: Gateway, ids: Ids, told: Told) -> None:
    body = json.dumps({"model": MODEL, "prompt": list(range(100)), "max_tokens": 4}).encode()
    inbound = Inbound(f"r-{ids.hex(8)}", Api.COMPLETIONS, trace_of(None, ids), body)
    started = virtual_clock().now()
    try:
        answer = await gateway.generation.serve(inbound, NoSink())  # type: ignore[arg-type]
        assert answer is not None
        status, says_when = answer.status, "retry-after" in answer.headers
    except PrfaasError as exc:
        status, says_when = exc.http_status, exc.retry_after_s is not None
    told.answers.append((virtual_clock().now() - started, status))
    told.mute += status in (429, 503) and not says_when


async def offered(gateway: Gateway, per_s: float, seconds: float) -> Told:
    """Evenly, whatever becomes of those before."""
    told, ids = Told(), Ids()
    async with asyncio.TaskGroup() as group:
        for _ in range(int(per_s * seconds)):
            group.create_task(ask(gateway, ids, told))
            await asyncio.sleep(1 / per_s)
    return told


BOUNDED = {"engine_active_requests": SLOTS, "gateway_waiting": 16, "gateway_wait_s": 3.0}
CAPACITY = 2 * SLOTS / SERVICE_S
SECONDS = 20.0


def load(share: float, **limits: Any) -> tuple[Told, list[PacedEngine]]:
    """`share` of what two engines can do."""

    async def main() -> tuple[Told, list[PacedEngine]]:
        engines = [PacedEngine(), PacedEngine()]
        gateway = gateway_of(engines, **limits)
        told = await offered(gateway, share * CAPACITY, SECONDS)
        assert gateway.engines.turns is None or gateway.engines.turns.active == 0
        gateway.generation.close()
        return told, engines

    return run_virtually(main())


def test_three_times_the_capacity_costs_no_goodput() -> None:
    good = {}
    for share in (0.5, 1.0, 1.5, 3.0):
        told, engines = load(share, **BOUNDED)
        good[share] = told.good
        assert {status for _, status in told.answers} <= {200, 503}
        assert told.mute == 0
        assert max(told.times(200)) <= 3.0 + SERVICE_S  # what was let in stays fast
        assert max(told.times(503), default=0.0) <= 3.0
        assert all(engine.most <= SLOTS for engine in engines)
    assert good[0.5] == 0.5 * CAPACITY * SECONDS
    assert good[3.0] >= 0.9 * max(good.values())
    assert good[3.0] >= 0.9 * CAPACITY * SECONDS


def test_without_a_bound_nobody_is_served_in_time() -> None:
    """What the bound is for: the test above fails without it."""
    told, _ = load(3.0)
    assert told.good < 0.5 * CAPACITY * SECONDS


def test_a_lost_engine_is_not_made_up_for_by_crushing_the_other() -> None:
    async def main() -> None:
        engines = [PacedEngine(), PacedEngine()]
        gateway = gateway_of(engines, **BOUNDED)
        load = asyncio.create_task(offered(gateway, 0.9 * CAPACITY, SECONDS))
        await asyncio.sleep(SECONDS / 2)
        engines[0].lost = True
        gateway.engines["d-0"].probe.reachable = False
        told = await load
        assert engines[1].most <= SLOTS
        assert {status for _, status in told.answers} <= {200, 503}
        assert told.mute == 0
        assert max(told.times(200)) <= 3.0 + 2 * SERVICE_S
        # All of the first half, and what one engine can do of the second.
        assert told.good >= 0.9 * (0.9 * CAPACITY + CAPACITY / 2) * SECONDS / 2

    run_virtually(main())


def tell(gateway: Gateway, engine: PacedEngine) -> None:
    """What the agents say: D is busy, P is idle, and what became of transfers."""
    view, ready = gateway.view, not engine.peer_lost
    curve = d_engine().curve
    outcomes = tuple(
        Outcome(each, "staged", peer=PEER, instance=INSTANCE, raw_bytes=1000)
        for each in engine.transfers
    )
    d = d_engine(queue_tokens=4000, curve=curve, free_staging_bytes=1 << 40)
    update = WatchUpdate(
        0, True, engines=(d,), links=(link(ready=ready),), kv=(KvDelta("d-0", "d1"),),
        started=tuple(engine.transfers), outcomes=outcomes if ready else (),
    )  # fmt: skip
    engine.transfers.clear()
    for outcome in view.update("d-0", update):
        gateway.generation.outcome(outcome)
    view.update(PLACE, WatchUpdate(0, True, engines=(p_engine(free_retention_bytes=1 << 40),)))


@pytest.mark.parametrize("bounded", [True, False])
def test_a_lost_peer_does_not_crush_d(bounded: bool) -> None:
    """Case 18: a few requests fall back to D, the excess is refused with a time to return, and D
    goes on at its own pace.
    """
    per_s = 20.0  # most of it the peer's; D alone can do four
    limits = {"engine_active_requests": 40, "gateway_waiting": 20, "gateway_wait_s": 2.0}
    budget = {"fallback_budget_tokens": 8 * 100} if bounded else {}

    async def main() -> None:
        engine = PacedEngine()
        gateway = gateway_of([engine], peer=True, **limits, **budget)
        tell(gateway, engine)

        async def agents() -> None:
            while True:
                await asyncio.sleep(0.1)
                tell(gateway, engine)

        talk = asyncio.create_task(agents())
        before = await offered(gateway, per_s, 10.0)
        assert len(before.times(200)) == len(before.answers)
        assert engine.most <= 2 * per_s * SERVICE_S
        engine.peer_lost = True
        lost = await offered(gateway, per_s, 10.0)
        talk.cancel()
        await asyncio.gather(talk, return_exceptions=True)
        assert {status for _, status in lost.answers} <= {200, 503}
        assert lost.mute == 0
        assert engine.most <= 40
        assert max(lost.times(200)) <= 2.0 + 40 / SLOTS * SERVICE_S
        assert len(lost.times(200)) >= 0.9 * SLOTS * 10.0
        gateway.generation.close()

    run_virtually(main())


@dataclass(frozen=True)
class Bound:
    """What it is of an engine that is short, as its agent tells it."""

    slots: int
    """Prompts that it really computes at once, a second each."""
    max_running: int
    computes: bool
    """It says how long what waits takes to compute; else only that it waits."""
    longest_s: float
    """That anybody who is let in waits in it, by the rules, and a second to be told."""


def report(gateway: Gateway, name: str, engine: PacedEngine, bound: Bound) -> None:
    """What its agent says of an engine."""
    waiting = engine.present - engine.running - engine.waiting_kv
    token_s = SERVICE_S / bound.slots / 100
    info = d_engine(
        name=name,
        queue_tokens=100 * waiting if bound.computes else 0,
        waiting=waiting + engine.waiting_kv,
        waiting_kv=engine.waiting_kv,
        running=engine.running,
        decode_step_s=0.0,
        curve=replace(d_engine().curve, base_s=0.0, token_s=token_s),
        max_running=bound.max_running,
    )
    update = WatchUpdate(0, True, engines=(info,), kv=(KvDelta(name, "d1"),))
    gateway.view.update(name, update)


@asynccontextmanager
async def agents_of(
    gateway: Gateway, engines: list[PacedEngine], bound: Bound
) -> AsyncIterator[None]:
    """They tell every quarter of a second how things stand."""

    async def tell_all() -> None:
        while True:
            for at, engine in enumerate(engines):
                report(gateway, f"d-{at}", engine, bound)
            await asyncio.sleep(0.25)

    task = asyncio.create_task(tell_all())
    await asyncio.sleep(0.01)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


BOUNDS = {
    "slots": Bound(4, 4, computes=True, longest_s=1.5),
    "prefill": Bound(4, 256, computes=True, longest_s=5.0 + 1.0),
    "kv": Bound(4, 64, computes=False, longest_s=32 / 4 + 2.0),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_with_nothing_set_engines_say_how_much_they_can_take(name: str) -> None:
    """Whatever they are short of: slots for decoding, time to prefill, or blocks."""
    bound = BOUNDS[name]
    longest_s = Limits().gateway_wait_s + bound.longest_s + SERVICE_S

    def run(share: float) -> Told:
        async def main() -> Told:
            engines = [PacedEngine(bound.slots), PacedEngine(bound.slots)]
            gateway = gateway_of(engines, agents=True)
            async with agents_of(gateway, engines, bound):
                told = await offered(gateway, share * CAPACITY, 2 * SECONDS)
            assert gateway.engines.turns is not None
            assert gateway.engines.turns.active == 0
            gateway.generation.close()
            return told

        return run_virtually(main())

    told = {share: run(share) for share in (0.5, 1.0, 3.0)}
    assert told[0.5].within(2 * SERVICE_S) == len(told[0.5].answers)
    for each in told.values():
        assert {status for _, status in each.answers} <= {200, 503}
        assert each.mute == 0
        assert max(each.times(200)) <= longest_s
    good = {share: each.within(longest_s) for share, each in told.items()}
    assert good[3.0] >= 0.9 * max(good.values())
    assert good[3.0] >= 0.9 * CAPACITY * 2 * SECONDS
    assert told[3.0].times(503)


def test_with_nothing_set_a_lost_peer_does_not_crush_d() -> None:
    """Four in five prefills were the peer's; D computes a prompt at a time."""
    bound = Bound(4, 64, computes=True, longest_s=0.0)
    per_s = 20.0

    async def main() -> None:
        engine = PacedEngine(bound.slots)
        gateway = gateway_of([engine], peer=True)
        told: set[str] = set()

        def tell_peer() -> None:
            view, ready = gateway.view, not engine.peer_lost
            report(gateway, "d-0", engine, bound)
            outcomes = tuple(
                Outcome(each, "staged", peer=PEER, instance=INSTANCE, raw_bytes=1000)
                for each in engine.transfers
            )
            told.update(engine.transfers)
            update = WatchUpdate(
                1, False, links=(link(ready=ready),), started=tuple(engine.transfers),
                outcomes=outcomes if ready else (),
            )  # fmt: skip
            engine.transfers.clear()
            for outcome in view.update("d-0", update):
                gateway.generation.outcome(outcome)
            p = p_engine(free_retention_bytes=1 << 40)
            view.update(PLACE, WatchUpdate(0, True, engines=(p,)))

        async def agents() -> None:
            while True:
                tell_peer()
                await asyncio.sleep(0.1)

        talk = asyncio.create_task(agents())
        await asyncio.sleep(0.01)
        before = await offered(gateway, per_s, 10.0)
        assert told, "nothing has left D"
        assert len(before.times(200)) == len(before.answers)
        engine.peer_lost = True
        lost = await offered(gateway, per_s, 20.0)
        talk.cancel()
        await asyncio.gather(talk, return_exceptions=True)
        assert {status for _, status in lost.answers} <= {200, 503}
        assert lost.mute == 0
        assert lost.times(503)
        # What waits in D is bounded by what it can compute in the time that one may wait.
        assert (
            max(lost.times(200))
            <= Limits().engine_queue_s + Limits().gateway_wait_s + 3 * SERVICE_S
        )
        assert len(lost.times(200)) >= 0.9 * SLOTS * 20.0
        gateway.generation.close()

    run_virtually(main())
