"""D's lanes: opened again soon after each break, and written to where they are silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import grpc.aio
import pytest

from prfaas.clock import SYSTEM_CLOCK
from prfaas.errors import ProtocolError
from prfaas.frames import Frame
from prfaas.testing.clock import ManualClock
from prfaas.testing.waiting import eventually
from remote_prefill.lanes import LOOK_MOST_S, RETRY_FIRST_S, LaneBook, LaneEvents, LaneSet


class Stream:
    """A lane's stream: answers ATTACH where it is to, and breaks on a write once it is dead."""

    def __init__(self, answers: bool) -> None:
        self.answers = answers
        self.dead = False
        """The connection is gone, and nobody has said so."""
        self.stuck = False
        """Writes wait for ever."""
        self.written: list[bytes] = []
        self.arrivals: asyncio.Queue[bytes | object] = asyncio.Queue()

    async def write(self, message: bytes) -> None:
        self.written.append(message)
        if self.stuck:
            await asyncio.Event().wait()
        if self.dead:
            self.arrivals.put_nowait(grpc.aio.EOF)
            raise asyncio.InvalidStateError
        if len(self.written) == 1 and self.answers:
            self.arrivals.put_nowait(message)

    async def read(self) -> object:
        return await self.arrivals.get()

    async def done_writing(self) -> None:
        self.arrivals.put_nowait(grpc.aio.EOF)

    def cancel(self) -> bool:
        return True


class Channel:
    """Gives streams and keeps them."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.answers = True

    def stream_stream(self, _: str) -> Callable[[], Stream]:
        def open_stream() -> Stream:
            self.streams.append(Stream(self.answers))
            return self.streams[-1]

        return open_stream


class Bench:
    """A LaneSet over some channels, and what it told."""

    def __init__(self, count: int) -> None:
        self.channels = [Channel() for _ in range(count)]
        self.clock = ManualClock()
        self.opened = self.lost = 0
        self.lanes = LaneSet(
            "fra/p0",
            cast(Any, self.channels),
            b"token",
            LaneBook(),
            LaneEvents(self._frames, self._lost, lambda error: None, self._opened),
            5.0,
            self.clock,
        )

    def _frames(self, frames: list[Frame], nbytes: int) -> None:
        raise ProtocolError("no KV is expected here")

    def _opened(self) -> None:
        self.opened += 1

    def _lost(self) -> None:
        self.lost += 1

    async def until_opened(self, count: int, limit_s: float) -> None:
        await eventually(lambda: self.opened >= count, within_s=limit_s)


async def test_a_lane_that_was_up_is_opened_again_soon_however_often_it_breaks() -> None:
    bench = Bench(1)
    began = SYSTEM_CLOCK.now()
    try:
        for count in range(1, 9):
            await bench.until_opened(count, 1.0)
            bench.channels[0].streams[-1].arrivals.put_nowait(grpc.aio.EOF)
    finally:
        await bench.lanes.close()
    assert bench.lost >= 7
    assert SYSTEM_CLOCK.now() - began < 20 * RETRY_FIRST_S, "doubled each time it would be 127"


async def test_a_lane_that_never_comes_up_is_tried_ever_less_often() -> None:
    bench = Bench(1)
    channel = bench.channels[0]
    channel.answers = False
    began = SYSTEM_CLOCK.now()
    try:
        while len(channel.streams) < 4:
            if channel.streams:
                channel.streams[-1].arrivals.put_nowait(grpc.aio.EOF)
            await asyncio.sleep(0.001)
    finally:
        await bench.lanes.close()
    # Pauses of 2, 4 and 8 times the first one, each shortened by up to a half.
    assert SYSTEM_CLOCK.now() - began > 0.5 * 14 * RETRY_FIRST_S
    assert (bench.opened, bench.lost) == (0, 0)


async def test_a_silent_lane_is_written_to_and_ends_where_that_shows_it_gone() -> None:
    bench = Bench(2)
    try:
        await bench.until_opened(2, 1)
        dead, alive = (channel.streams[0] for channel in bench.channels)
        dead.dead = True
        bench.clock.advance(0.1)
        bench.lanes.poke(0.2)
        await asyncio.sleep(0)
        assert len(dead.written) == len(alive.written) == 1, "it has not been silent for long"
        bench.clock.advance(0.2)
        bench.lanes.poke(0.2)
        await bench.until_opened(3, 1)
        assert bench.lost == 1
        assert alive.written == [alive.written[0]] * 2, "it says who it is, as at first"
    finally:
        await bench.lanes.close()


async def test_silence_is_looked_into_ever_less_often_and_a_stuck_write_not_twice() -> None:
    bench = Bench(2)
    try:
        await bench.until_opened(2, 1)
        lane, stuck = (channel.streams[0] for channel in bench.channels)
        stuck.stuck = True
        times = []
        for tick in range(400):
            bench.clock.advance(0.05)
            before = len(lane.written)
            bench.lanes.poke(0.2)
            await asyncio.sleep(0)
            if len(lane.written) > before:
                times.append(round(0.05 * (tick + 1), 2))
        pauses = [later - earlier for earlier, later in pairwise([0.0, *times])]
        assert pauses[:5] == pytest.approx([0.2 * 2**n for n in range(5)], abs=0.06)
        assert pauses[5:] == pytest.approx([LOOK_MOST_S] * len(pauses[5:]), abs=0.06)
        assert len(stuck.written) == 2
    finally:
        await bench.lanes.close()


async def test_after_a_time_in_which_nothing_was_due_silence_is_looked_into_soon_again() -> None:
    bench = Bench(1)
    try:
        await bench.until_opened(1, 1)
        (lane,) = (channel.streams[0] for channel in bench.channels)
        for _ in range(2):
            bench.clock.advance(600)
            looks = []
            for tick in range(30):
                before = len(lane.written)
                bench.lanes.poke(0.2)
                await asyncio.sleep(0)
                if len(lane.written) > before:
                    looks.append(round(0.05 * tick, 2))
                bench.clock.advance(0.05)
            assert looks == pytest.approx([0.0, 0.4, 1.2], abs=0.11), "in ticks of 0.05"
    finally:
        await bench.lanes.close()


async def test_lanes_close_in_order_when_they_are_drained() -> None:
    bench = Bench(2)
    await bench.until_opened(2, 1)
    async with asyncio.timeout(2):
        await bench.lanes.drain()
    assert bench.lost == 2
    assert bench.opened == 2
