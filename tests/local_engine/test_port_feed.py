"""The agent is told what changed, soon but not at once, and everything after a reconnect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from local_engine.kv.events import CacheEventLog
from local_engine.port_feed import MIN_INTERVAL_S, PortFeed
from local_engine.requests import EngineStats
from prfaas.testing.clock import ManualClock
from prfaas.testing.fake_port import FakePort
from prfaas.testing.waiting import eventually
from prfaas_connect.port.messages import KvEvents, Stats

NAME = b"n" * 16
LOAD = EngineStats(total_blocks=10, free_blocks=10)


class Bench:
    def __init__(self, interval_s: float = 0.25) -> None:
        self.port = FakePort()
        self.clock = ManualClock()
        self.events = CacheEventLog("e")
        self.feed = PortFeed(self.port, self.events, interval_s, self.clock)

    def publish(self, after_s: float = 1.0, **fields: int) -> list[Stats]:
        """Stats that `publish` sends `after_s` later."""
        self.clock.advance(after_s)
        before = len(self.port.of(Stats))
        self.feed.publish(replace(LOAD, **fields))
        return self.port.of(Stats)[before:]


def test_nothing_is_sent_before_the_first_snapshot() -> None:
    bench = Bench()
    bench.events.stored(NAME)
    assert bench.publish() == []
    assert bench.port.sent == []
    assert not bench.feed.pending
    assert not bench.events.pending, "nobody listens, so nothing piles up"


def test_a_connection_begins_with_the_whole_cache_and_the_load() -> None:
    bench = Bench()
    bench.publish(running=3)
    bench.feed.synchronise([NAME])
    (events,) = bench.port.of(KvEvents)
    assert events.cleared
    assert events.stored == [NAME.hex()]
    assert [s.running for s in bench.port.of(Stats)] == [3]


def test_changes_are_sent_once_and_not_more_often_than_agreed() -> None:
    bench = Bench()
    bench.publish()
    bench.feed.synchronise([])
    assert [s.running for s in bench.publish(running=1)] == [1]
    assert bench.publish(running=1) == []
    assert [s.running for s in bench.publish(running=2)] == [2]
    assert bench.publish(MIN_INTERVAL_S / 2, running=3) == []
    assert bench.feed.pending
    assert [s.running for s in bench.publish(MIN_INTERVAL_S, running=3)] == [3]
    assert not bench.feed.pending


def test_cache_changes_wait_for_each_other() -> None:
    bench = Bench()
    bench.publish()
    bench.feed.synchronise([])
    bench.port.sent.clear()
    for index in range(4):
        bench.events.stored(bytes([index]) * 16)
        bench.publish(MIN_INTERVAL_S * 0.6)
    sent = bench.port.of(KvEvents)
    assert [len(m.stored) for m in sent] == [1, 2]
    assert bench.feed.pending
    assert [m.seq for m in sent] == [2, 3]


def test_after_a_disconnect_deltas_stop_until_the_next_snapshot() -> None:
    bench = Bench()
    bench.publish()
    bench.feed.synchronise([])
    bench.feed.disconnected()
    bench.port.sent.clear()
    bench.events.stored(NAME)
    bench.publish(running=1)
    assert bench.port.sent == []
    bench.feed.synchronise([NAME])
    assert bench.port.of(KvEvents)[0].cleared
    assert bench.port.of(Stats)[0].running == 1


def test_a_message_that_does_not_go_out_ends_the_deltas() -> None:
    bench = Bench()
    bench.publish()
    bench.feed.synchronise([])
    bench.port.disconnect()
    bench.events.stored(NAME)
    bench.publish()
    bench.port.reconnect()
    bench.port.sent.clear()
    bench.events.removed(NAME)
    bench.publish()
    assert bench.port.of(KvEvents) == []


def test_a_snapshot_that_does_not_go_out_starts_no_deltas() -> None:
    bench = Bench()
    bench.port.disconnect()
    bench.feed.synchronise([NAME])
    bench.port.reconnect()
    bench.events.stored(NAME)
    bench.publish()
    assert bench.port.sent == []


async def test_what_was_too_fresh_is_sent_soon_also_within_a_long_step() -> None:
    bench = Bench(interval_s=60.0)
    bench.publish()
    bench.feed.synchronise([])
    bench.feed.start()
    try:
        assert [s.running for s in bench.publish(running=1)] == [1]
        assert bench.publish(MIN_INTERVAL_S / 2, running=2) == []
        assert bench.publish(MIN_INTERVAL_S / 4, running=3) == []
        bench.clock.advance(MIN_INTERVAL_S)
        await eventually(lambda: bench.port.of(Stats)[-1].running == 3)
        assert not bench.feed.pending
    finally:
        bench.feed.close()


async def test_what_came_counts_until_the_engine_has_taken_it() -> None:
    bench = Bench(interval_s=60.0)
    bench.feed.came(7)
    bench.publish(running=1)
    bench.feed.synchronise([])
    bench.feed.start()

    def last() -> tuple[int, int]:
        stats = bench.port.of(Stats)[-1]
        return stats.waiting, stats.queue_tokens

    try:
        assert last() == (1, 7)
        bench.clock.advance(MIN_INTERVAL_S)
        bench.feed.came(100)
        await eventually(lambda: last() == (2, 107))
        bench.clock.advance(MIN_INTERVAL_S)
        bench.feed.publish(replace(LOAD, waiting=1, queue_tokens=60), 1, 7)
        await eventually(lambda: last() == (2, 160))
        bench.clock.advance(MIN_INTERVAL_S)
        bench.feed.publish(LOAD, 1, 100)
        await eventually(lambda: last() == (0, 0))
    finally:
        bench.feed.close()


@pytest.mark.parametrize("synchronised", [True, False])
async def test_the_load_is_repeated_while_the_engine_is_silent(synchronised: bool) -> None:
    bench = Bench(interval_s=0.01)
    bench.publish(running=5)
    if synchronised:
        bench.feed.synchronise([])
    bench.feed.start()
    try:
        if synchronised:
            for _ in range(3):
                before = len(bench.port.of(Stats))
                bench.clock.advance(0.01)
                await eventually(lambda before=before: len(bench.port.of(Stats)) > before)
            assert {s.running for s in bench.port.of(Stats)} == {5}
        else:
            bench.clock.advance(1.0)
            assert bench.port.of(Stats) == []
    finally:
        bench.feed.close()
        bench.feed.close()
