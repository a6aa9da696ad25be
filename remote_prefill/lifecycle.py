"""How an agent's process ends: the first signal drains, the second forces."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import grpc.aio

from prfaas.clock import Deadline

log = logging.getLogger(__name__)

FLUSH_S = 0.5
"""The last words of a process that is forced to end, errors and outcomes, may take so long."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """What the signals have asked for so far."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.force = asyncio.Event()

    def on_signal(self) -> None:
        """SIGTERM or SIGINT came."""
        if self.drain.is_set():
            self.force.set()
        self.drain.set()

    async def drained(self, idle: Awaitable[None], limit_s: float) -> bool:
        """Wait until `idle`, the limit or a second signal; True where it is idle."""
        waits = [asyncio.ensure_future(idle), asyncio.ensure_future(self.force.wait())]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            return waits[0].done()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


class DrainableAgent(Protocol):
    """What takes no new work after `drain` and is then done at some time."""

    def drain(self) -> None: ...
    async def wait_idle(self) -> None: ...


class AgentProcess(Protocol):
    """An agent's servers; `stop` also ends what a failed start left."""

    async def start(self) -> int: ...
    async def stop(self, grace_s: float, force: asyncio.Event) -> None: ...


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Catch the signals while inside; the loop's main thread only."""
    loop = asyncio.get_running_loop()
    signals = StopSignals()
    for number in SIGNALS:
        loop.add_signal_handler(number, signals.on_signal)
    try:
        yield signals
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def stop_grpc(server: grpc.aio.Server, grace_s: float, force: asyncio.Event) -> None:
    """Stop once all streams have ended and what they carry has left, at the latest after `grace_s`,
    or soon after `force` is set.

    The end of a handler is not the end of its stream: up to some megabytes are on their way then.
    """
    stopping = asyncio.ensure_future(server.stop(max(grace_s, FLUSH_S)))
    forced = asyncio.ensure_future(force.wait())
    try:
        await asyncio.wait({stopping, forced}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await server.stop(FLUSH_S)
        await stopping
    finally:
        forced.cancel()
        await asyncio.gather(stopping, forced, return_exceptions=True)


async def run_until_stopped(
    server: AgentProcess,
    agent: DrainableAgent,
    drain_timeout_s: float,
    ready: Callable[[int], None] | None,
) -> None:
    """Run until a signal, then drain. `ready` gets the port once it serves. Raises ConfigError."""
    grace_s = 0.0
    with stop_signals() as signals:
        try:
            port = await server.start()
            if ready is not None:
                ready(port)
            await signals.drain.wait()
            agent.drain()
            log.info("draining %r", agent)
            deadline = Deadline.after(drain_timeout_s)
            if await signals.drained(agent.wait_idle(), deadline.remaining_s()):
                grace_s = deadline.remaining_s()
        finally:
            await server.stop(grace_s, signals.force)
