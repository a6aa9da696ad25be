"""The first signal drains up to the limit, the second forces."""

from __future__ import annotations

import asyncio
import os
import signal

from remote_prefill.lifecycle import StopSignals, stop_signals


async def never() -> None:
    await asyncio.Event().wait()


async def test_idle_ends_the_drain() -> None:
    signals = StopSignals()
    signals.on_signal()
    assert await signals.drained(asyncio.sleep(0), 5)


async def test_the_limit_ends_the_drain() -> None:
    assert not await StopSignals().drained(never(), 0.01)


async def test_a_second_signal_ends_the_drain() -> None:
    signals = StopSignals()
    signals.on_signal()
    assert not signals.force.is_set()
    waiting = asyncio.ensure_future(signals.drained(never(), 5))
    await asyncio.sleep(0)
    signals.on_signal()
    assert not await asyncio.wait_for(waiting, 1)


async def test_real_signals_arrive_and_their_handlers_are_taken_back() -> None:
    with stop_signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(signals.drain.wait(), 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(signals.force.wait(), 1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
