"""Starts the processes of `prfaas up`, watches them, and stops them in a fixed order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from prfaas.up.process import ManagedProcess, ProcessSpec


class Supervisor:
    """Owns child processes; `async with` ends them all, last started first."""

    def __init__(self, *, stop_grace_s: float) -> None:
        self._stop_grace_s = stop_grace_s
        self._running: list[ManagedProcess] = []
        self._guards: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[ManagedProcess] = asyncio.Queue()

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop_all()

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        return tuple(self._running)

    async def start(self, specs: Sequence[ProcessSpec], ready_timeout_s: float) -> None:
        """Start these together and wait until all are ready. Raises ProcessEnded."""
        started = []
        for spec in specs:
            process = ManagedProcess(spec)
            self._running.append(process)
            await process.start()
            self._guards.add(asyncio.create_task(self._guard(process)))
            started.append(process)
        await asyncio.gather(*(process.wait_ready(ready_timeout_s) for process in started))

    async def watch(self) -> NoReturn:
        """Raises ProcessEnded as soon as a process ends that nobody stopped."""
        raise (await self._ended.get()).ended_error()

    async def stop(self, name: str) -> int | None:
        """Stop one process that is meant to end; its exit status."""
        process = self.find(name)
        self._running.remove(process)
        return await process.stop(self._stop_grace_s)

    async def kill(self, name: str) -> None:
        """End one process at once, as a fault that is meant; `start` may start it again."""
        process = self.find(name)
        self._running.remove(process)
        await process.kill()

    def find(self, name: str) -> ManagedProcess:
        """Raises KeyError where it does not run."""
        for process in self._running:
            if process.spec.name == name:
                return process
        raise KeyError(name)

    async def stop_all(self) -> dict[str, int | None]:
        """Stop what runs, last started first; statuses by name. Kills the rest if cancelled."""
        statuses: dict[str, int | None] = {}
        try:
            while self._running:
                process = self._running.pop()
                statuses[process.spec.name] = await process.stop(self._stop_grace_s)
        finally:
            rest, self._running = self._running, []
            await asyncio.gather(*(process.kill() for process in rest))
            await asyncio.gather(*self._guards)
        return statuses

    async def _guard(self, process: ManagedProcess) -> None:
        await process.wait()
        if process in self._running:
            self._ended.put_nowait(process)
