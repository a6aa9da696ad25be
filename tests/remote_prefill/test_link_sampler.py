"""The agent's thread knows how busy it is, and looks go on whatever happens."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from prfaas.clock import SYSTEM_CLOCK
from prfaas.testing.clock import ManualClock
from prfaas.testing.waiting import eventually
from remote_prefill.link_sampler import LOOK_S, LinkSampler, LoopLoad


class Loop:
    """A thread of which a share is used."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cpu_s = 0.0
        self.load = LoopLoad(self.clock, lambda: self.cpu_s)

    def run(self, seconds: float, busy: float, every_s: float = LOOK_S) -> None:
        for _ in range(round(seconds / every_s)):
            self.clock.advance(every_s)
            self.cpu_s += busy * every_s
            self.load.look()


def test_load_is_the_cpu_time_of_the_last_second() -> None:
    loop = Loop()
    assert loop.load.busy_share == 0.0
    loop.run(5.0, 0.1)
    assert loop.load.busy_share == pytest.approx(0.1, abs=0.01)
    loop.run(1.0, 1.0)
    assert loop.load.busy_share == pytest.approx(1.0, abs=0.01)
    loop.run(1.0, 0.25)
    assert loop.load.busy_share == pytest.approx(0.25, abs=0.01)


def test_a_thread_that_does_not_come_to_look_is_busy_though_it_computes_nothing() -> None:
    loop = Loop()
    loop.run(2.0, 0.05)
    loop.run(2.0, 0.05, every_s=1.0)
    assert loop.load.busy_share == pytest.approx(0.95, abs=0.01)
    loop.run(2.0, 0.05, every_s=0.06)  # a little late is nothing
    assert loop.load.busy_share < 0.2


async def test_a_real_loop_that_computes_is_busy_and_one_that_waits_is_not() -> None:
    load = LoopLoad(SYSTEM_CLOCK)
    sampler = LinkSampler(load.look)
    try:
        await asyncio.sleep(0.2)
        await eventually(lambda: 0 < load.busy_share < 0.5)
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            step = time.thread_time() + 0.01
            while time.thread_time() < step:
                pass
            await asyncio.sleep(0)
        assert load.busy_share > 0.3  # other processes may have had the rest
    finally:
        await sampler.close()


async def test_looks_go_on_after_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(len(seen))
        if len(seen) == 1:
            raise ValueError("the first one")

    sampler = LinkSampler(look)
    with caplog.at_level(logging.CRITICAL, logger="remote_prefill.link_sampler"):
        await eventually(lambda: len(seen) >= 3)
    await sampler.close()
    count = len(seen)
    await asyncio.sleep(3 * LOOK_S)
    assert len(seen) == count
