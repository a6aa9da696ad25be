"""The first signal drains up to the limit, the second forces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any, cast

from remote_prefill.lifecycle import FLUSH_S, StopSignals, stop_grpc, stop_signals


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


class Slow:
    """A gRPC server whose streams end after a while, or when the grace is over."""

    def __init__(self, streams_s: float) -> None:
        self._ended = asyncio.Event()
        asyncio.get_running_loop().call_later(streams_s, self._ended.set)
        self.graces: list[float] = []

    async def stop(self, grace: float) -> None:
        self.graces.append(grace)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), grace)
        self._ended.set()


async def test_stopping_waits_for_streams_within_the_grace() -> None:
    server: Any = Slow(0.05)
    await asyncio.wait_for(stop_grpc(server, 5.0, asyncio.Event()), 1)
    assert server.graces == [5.0]


async def test_a_second_signal_leaves_streams_a_moment_only() -> None:
    server, force = Slow(5.0), asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, force.set)
    await asyncio.wait_for(stop_grpc(cast(Any, server), 5.0, force), 2)
    assert server.graces == [5.0, FLUSH_S]
