"""Workers meet at a unix socket: it keeps the contract of a store, and feeds their views."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gateway.admission import FallbackBudget
from gateway.cluster_view import ClusterView
from gateway.members import Members
from gateway.state.memory import MemoryStore
from gateway.workers import state_server
from gateway.workers.link import Hearers, WorkerLink
from gateway.workers.messages import Hello, MembersAre, Tell, TellSent, Unfed
from gateway.workers.state_server import StateServer
from gateway.workers.told_view import ToldView
from prfaas.clock import SYSTEM_CLOCK
from prfaas.cluster_state import ClusterStore, Member, Report, Sent
from prfaas.errors import StateUnavailable
from prfaas.snapshot import Outcome
from prfaas.telemetry import KvDelta, WatchUpdate
from prfaas.testing.gateway_setup import (
    ENGINE,
    PLACE,
    d_engine,
    gateway_settings,
    link,
    p_engine,
)
from prfaas.testing.state_contract import ClusterStateContract
from prfaas.testing.waiting import eventually

SETTINGS = gateway_settings()
MEMBERS = Members(SETTINGS.gateway.engines, SETTINGS.gateway.peers)


class State:
    """The process that keeps the state, in this one; it can die and come back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.members = MEMBERS

    async def start(self) -> None:
        self.view = ToldView(
            SETTINGS.gateway, SETTINGS.limits, SYSTEM_CLOCK, lambda m: self.server.tell(m)
        )
        self.server = StateServer(
            self.path,
            MemoryStore(SYSTEM_CLOCK),
            self.view,
            lambda: self.members,
            SYSTEM_CLOCK,
        )
        await self.server.start()

    async def die(self) -> None:
        await self.server.close()
        self.path.unlink(missing_ok=True)


class Worker:
    """One worker's view, fed by the socket."""

    def __init__(self, path: Path, index: int = 0) -> None:
        self.link = WorkerLink(path, index, SYSTEM_CLOCK, timeout_s=10.0)
        self.view = ClusterView(SETTINGS.gateway, SETTINGS.limits, SYSTEM_CLOCK)
        self.budget = FallbackBudget(1000)
        self.outcomes: list[Outcome] = []
        self.applied: list[Members] = []
        self.leaving: tuple[str, ...] = ()

    async def start(self) -> Members:
        members = await self.link.members(10.0)
        self.link.start(
            Hearers(self.view, self.budget, self._apply, self.outcomes.append, self._leaving)
        )
        return members

    async def tell(self) -> None:
        await self.link.exchange(Report(Member(f"w{id(self)}"), 60.0))

    async def _apply(self, members: Members) -> None:
        self.applied.append(members)

    def _leaving(self) -> tuple[str, ...]:
        return self.leaving


@pytest.fixture
async def state() -> AsyncIterator[State]:
    with tempfile.TemporaryDirectory(prefix="pw") as folder:
        made = State(Path(folder) / "s")
        await made.start()
        yield made
        await made.die()


@pytest.fixture
async def worker(state: State) -> AsyncIterator[Worker]:
    made = Worker(state.path)
    await made.start()
    yield made
    await made.link.close()


class TestWorkerStore(ClusterStateContract):
    """Over a socket, with the machine's clock."""

    @pytest.fixture
    async def store(self, state: State) -> AsyncIterator[ClusterStore]:
        self.state = state
        worker = Worker(state.path)
        await worker.start()
        yield worker.link
        await worker.link.close()

    async def forget(self, store: ClusterStore) -> None:
        """The process dies, and another one takes its place."""
        assert isinstance(store, WorkerLink)
        losses = store.losses
        await self.state.die()
        await self.state.start()
        await eventually(lambda: store.losses > losses and store.up, within_s=20)


def packed(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def stored(*blocks: bytes, cleared: bool = False) -> KvDelta:
    return KvDelta(ENGINE, "d1", cleared=cleared, stored=blocks)


def event(seq: int, *deltas: KvDelta, full: bool = False, **fields: object) -> WatchUpdate:
    engines = (d_engine(),) if full else ()
    links = (link(),) if full else ()
    return WatchUpdate(seq, full, "agent", engines, deltas, links, **fields)  # type: ignore[arg-type]


async def test_a_worker_that_comes_late_knows_all_that_the_others_know(
    state: State, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_server, "BLOCKS_AT_ONCE", 2)
    blocks = tuple(bytes([at]) * 16 for at in range(5))
    state.view.update(ENGINE, event(0, stored(*blocks[:3], cleared=True), full=True))
    state.view.update(ENGINE, event(1, stored(*blocks[3:])))
    state.view.update(PLACE, WatchUpdate(0, True, "p-agent", (p_engine(),)))
    state.view.disconnected(PLACE)
    late = Worker(state.path, 1)
    assert await late.start() == MEMBERS
    for each in (worker, late):
        await each.tell()  # what was known before its answer has come before it
        feed = each.view.feeds[ENGINE]
        assert feed.connected
        assert feed.engine == d_engine()
        assert feed.links == state.view.feeds[ENGINE].links
        assert each.view.index.held(ENGINE) is not None
        assert each.view.index.match(ENGINE, blocks) == 5
        assert each.view.cache_known(ENGINE)
        assert not each.view.feeds[PLACE].connected
        assert each.view.feeds[PLACE].engine == p_engine()
        assert abs(feed.age_s(0) - state.view.feeds[ENGINE].age_s(0)) < 5
    assert not late.view.cache_known(PLACE), "an index that cannot be kept up is none"
    await late.link.close()


async def test_every_worker_hears_of_every_outcome_in_order(state: State, worker: Worker) -> None:
    other = Worker(state.path, 1)
    await other.start()
    state.view.update(ENGINE, event(0, full=True))
    for at in range(50):
        outcome = Outcome(f"t{at}", "staged", phases={"total": 1.0})
        state.view.update(ENGINE, event(at + 1, outcomes=(outcome,)))
    for each in (worker, other):
        await each.tell()
        assert [outcome.transfer_id for outcome in each.outcomes] == [f"t{at}" for at in range(50)]
    await other.link.close()


async def test_what_is_known_stays_while_the_state_is_gone_and_is_made_anew_after(
    state: State, worker: Worker
) -> None:
    state.view.update(ENGINE, event(0, stored(b"x" * 16, cleared=True), full=True))
    await worker.tell()
    await state.die()
    await eventually(lambda: not worker.link.up)
    assert worker.link.losses == 1
    feed = worker.view.feeds[ENGINE]
    assert feed.connected
    assert feed.engine == d_engine()
    assert worker.view.index.match(ENGINE, [b"x" * 16]) == 1

    state.members = Members(MEMBERS.engines, ())
    await state.start()
    await eventually(lambda: worker.link.up)
    await worker.tell()
    assert worker.applied == [state.members]
    assert worker.view.index.match(ENGINE, [b"x" * 16]) == 1, "nothing newer is known yet"
    state.view.update(ENGINE, event(0, stored(cleared=True), full=True))
    await worker.tell()
    assert worker.view.index.match(ENGINE, [b"x" * 16]) == 0


async def test_an_exchange_waits_for_the_state_to_come_back(state: State, worker: Worker) -> None:
    await state.die()
    await eventually(lambda: not worker.link.up)
    telling = asyncio.create_task(worker.tell())
    await state.start()
    await asyncio.wait_for(telling, 20)


async def test_the_fallback_budget_is_one_for_all(state: State, worker: Worker) -> None:
    other = Worker(state.path, 1)
    await other.start()
    assert worker.budget.grant("a", 700)
    await worker.tell()
    await other.tell()
    assert other.budget.free_tokens == 300
    assert not other.budget.grant("b", 400)
    assert other.budget.grant("c", 300)
    worker.budget.finish("a")
    await worker.tell()
    await other.tell()
    assert other.budget.free_tokens == 700
    await other.link.close()
    await eventually(lambda: len(state.server.workers) == 1)
    await worker.tell()
    assert worker.budget.free_tokens == 1000, "what a dead worker had granted is nobody's"


async def test_what_a_worker_said_of_itself_is_gone_with_it(state: State, worker: Worker) -> None:
    other = Worker(state.path, 1)
    await other.start()
    await worker.tell()
    await other.tell()
    shared = await worker.link.exchange(Report(Member("third"), 60.0))
    assert len(shared.members) == 3
    await other.link.close()
    await eventually(lambda: len(state.server.workers) == 1)
    shared = await worker.link.exchange(Report(Member("third"), 60.0))
    assert len(shared.members) == 2


async def test_engines_that_still_answer_are_known_to_the_state(
    state: State, worker: Worker
) -> None:
    worker.leaving = ("gone",)
    await worker.tell()
    assert state.server.leaving == {"gone"}
    worker.leaving = ()
    await worker.tell()
    assert state.server.leaving == frozenset()


async def test_the_age_of_what_a_worker_knows(state: State, worker: Worker) -> None:
    assert worker.link.age_s == float("inf")
    await worker.tell()
    assert 0 <= worker.link.age_s < 60
    assert worker.link.peak_age_s >= worker.link.age_s - 1


async def test_somebody_who_speaks_otherwise_is_left_and_the_others_go_on(
    state: State, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1", b"\xff\xff\xff\xff"):
        reader, writer = await asyncio.open_unix_connection(state.path)
        writer.write(data)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
    assert "does not speak" in caplog.text
    await worker.tell()


async def test_a_worker_finds_no_state_in_time() -> None:
    with tempfile.TemporaryDirectory(prefix="pw") as folder:
        nobody = WorkerLink(Path(folder) / "s", 0, SYSTEM_CLOCK, 0.01)
        with pytest.raises(StateUnavailable):
            await nobody.members(0.05)
        with pytest.raises(StateUnavailable):
            await nobody.exchange(Report(Member("a"), 1.0))


async def test_who_connects_and_says_nothing_is_left(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_server, "HELLO_S", 0.01)
    reader, writer = await asyncio.open_unix_connection(state.path)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_every_cut_of_what_a_worker_says_leaves_nothing_behind(
    state: State, worker: Worker
) -> None:
    said = [Hello(7), Tell(Report(Member("cut"), 60.0), 5, ("d-9",)), TellSent(Sent("cut", 1, {}))]
    frames = b"".join(len(raw).to_bytes(4, "big") + raw for raw in map(packed, said))
    for end in range(len(frames) + 1):
        _, writer = await asyncio.open_unix_connection(state.path)
        writer.write(frames[:end])
        writer.close()
        await writer.wait_closed()
    await eventually(lambda: len(state.server.workers) == 1, within_s=20)
    await worker.tell()
    shared = await worker.link.exchange(Report(Member("w"), 60.0))
    assert "cut" not in {member.id for member in shared.members}
    assert not state.server.leaving


NO_ENGINE = MembersAre(({"name": "@@"},), ())


@pytest.mark.parametrize(
    "first",
    [
        packed(NO_ENGINE),
        packed(NO_ENGINE).replace(b"\xa2@@", 5000 * b"\x91" + b"\xc0"),
        packed(Unfed("d-0")),
    ],
    ids=["no engine", "too deep", "another message"],
)
async def test_a_state_that_speaks_otherwise_is_asked_again(first: bytes) -> None:
    """It may be one of another version, on its way out."""
    answers = [packed(MembersAre.of(MEMBERS)), first]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = answers.pop() if len(answers) > 1 else answers[0]
        writer.write(len(raw).to_bytes(4, "big") + raw)
        await reader.read()
        writer.close()

    with tempfile.TemporaryDirectory(prefix="pw") as folder:
        path = Path(folder) / "s"
        server = await asyncio.start_unix_server(serve, path)
        worker = Worker(path)
        assert await worker.start() == MEMBERS
        await worker.link.close()
        server.close()
        await server.wait_closed()


async def test_an_exchange_that_wakes_up_when_the_state_is_gone_again_fails_as_any_other() -> None:
    """Its first message and its end can come in one turn of the loop: as seen with uvloop."""
    with tempfile.TemporaryDirectory(prefix="pw") as folder:
        link = Worker(Path(folder) / "s").link
        exchange = asyncio.create_task(link.exchange(Report(Member("a"), 60.0)))
        await asyncio.sleep(0)
        link._up.set()
        link._up.clear()
        with pytest.raises(StateUnavailable):
            await exchange
