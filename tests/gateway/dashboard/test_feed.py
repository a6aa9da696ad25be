"""Many pages at one feed: one look for all, and a bound for each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.dashboard import feed as feed_module
from gateway.dashboard.feed import MAX_BEHIND, MAX_WATCHERS, Feed, Watcher
from gateway.dashboard.latest import Latest
from gateway.dashboard.messages import Latency, Saved, Share, State
from gateway.records import RecordBook
from prfaas.errors import Overloaded
from prfaas.snapshot import Decision, Reason, Target
from prfaas.testing.clock import ManualClock
from prfaas.testing.waiting import eventually


class Looks:
    """Makes states, counts them, and fails when it is told to."""

    def __init__(self) -> None:
        self.count = 0
        self.broken = False

    def __call__(self) -> State:
        self.count += 1
        if self.broken:
            raise ValueError("broken")
        nothing = {"local": Latency(), "remote": Latency()}
        return State(
            float(self.count), 1.0, "ready", 0, 0, 300.0, [], [], [], nothing, Share(), Saved(),
            [], [], None,
        )  # fmt: skip


@asynccontextmanager
async def running(feed: Feed) -> AsyncIterator[None]:
    task = asyncio.create_task(feed.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "TICK_S", 0.005)
    monkeypatch.setattr(feed_module, "LEISURE", 0)


@pytest.fixture
def records() -> RecordBook:
    return RecordBook(1000, ManualClock())


async def test_without_a_page_nothing_is_looked_at(records: RecordBook) -> None:
    looks = Looks()
    feed = Feed(looks, Latest(records))
    async with running(feed):
        await asyncio.sleep(0.05)
        assert looks.count == 0
        with feed.watching():
            await eventually(lambda: looks.count > 1)
        seen = looks.count
        await asyncio.sleep(0.05)
        assert looks.count <= seen + 1


async def test_every_page_hears_the_same_bytes_of_one_look(records: RecordBook) -> None:
    looks = Looks()
    feed = Feed(looks, Latest(records))
    with feed.watching() as one, feed.watching() as other:
        async with running(feed):
            first, second = await asyncio.gather(one.next(), other.next())
    assert first == second
    assert first is not None
    assert first.startswith(b"event: state\ndata: {")
    assert first.endswith(b"}\n\n")


async def test_a_page_that_reads_nothing_holds_one_state_and_a_few_messages(
    records: RecordBook,
) -> None:
    looks = Looks()
    feed = Feed(looks, Latest(records))
    with feed.watching() as watcher:
        async with running(feed):
            for at in range(3 * MAX_BEHIND):
                record = records.open(str(at), "chat", "trace", str(at))
                record.decision = Decision(Target.LOCAL, Reason.TOO_SHORT)
                seen = looks.count
                await eventually(lambda seen=seen: looks.count > seen)
        assert watcher.waiting == MAX_BEHIND + 1
        news = await watcher.next()
        assert news is not None
        assert news.count(b"event: state") == 1
        assert watcher.waiting == 0


async def test_more_pages_than_the_bound_are_refused_and_a_closed_one_makes_room(
    records: RecordBook,
) -> None:
    feed = Feed(Looks(), Latest(records))
    with contextlib.ExitStack() as pages:
        for _ in range(MAX_WATCHERS):
            pages.enter_context(feed.watching())
        with pytest.raises(Overloaded), feed.watching():
            pass
    with feed.watching():
        assert feed.watchers == 1


async def test_a_look_that_fails_is_said_and_the_next_one_is_shown(
    records: RecordBook, caplog: pytest.LogCaptureFixture
) -> None:
    looks = Looks()
    looks.broken = True
    feed = Feed(looks, Latest(records))
    with feed.watching() as watcher:
        async with running(feed):
            await eventually(lambda: "could not be drawn" in caplog.text)
            looks.broken = False
            assert await watcher.next()


async def test_closing_ends_every_page_and_takes_no_more(records: RecordBook) -> None:
    feed = Feed(Looks(), Latest(records))
    with feed.watching() as watcher:
        waiting = asyncio.create_task(watcher.next())
        await asyncio.sleep(0)
        feed.close()
        assert await waiting is None
    with pytest.raises(Overloaded), feed.watching():
        pass


async def test_a_watcher_gives_requests_before_the_state_they_belong_to() -> None:
    watcher = Watcher()
    watcher.put_state(b"old ")
    watcher.put_requests(b"r1 ")
    watcher.put_state(b"s2 ")
    watcher.put_requests(b"r2 ")
    assert await watcher.next() == b"r1 r2 s2 "
