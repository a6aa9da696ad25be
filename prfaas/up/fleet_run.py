"""`prfaas up --fleet FILE`: start a fleet, keep it up, and let go wrong what its file says."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from prfaas.errors import ConfigError, PrfaasError
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import FleetFault, read_fleet
from prfaas.up.fleet_processes import FleetProcesses, words


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What the command line said."""

    file: Path
    port: int | None
    once: bool
    """Stop when it is ready and the last fault is over."""


def run_fleet(options: FleetOptions) -> int:
    """Run until stopped; the exit status. Raises ConfigError before anything starts."""
    console = Console(highlight=False)
    fleet = read_fleet(options.file)
    directory = Path(tempfile.mkdtemp(prefix="prfaas-fleet-"))
    status = 1
    try:
        plan = FleetPlan.create(fleet, options.file, directory, options.port)
        status = uvloop.run(FleetRun(plan, console).run(once=options.once))
    except ConfigError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        if status == 0:
            shutil.rmtree(directory, ignore_errors=True)
        elif directory.exists():
            console.print(f"logs and configuration are kept in {directory}", markup=False)
    return status


class FleetRun:
    """One run of a fleet; owns its processes and lines while `run` runs."""

    def __init__(self, plan: FleetPlan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._fleet = FleetProcesses(plan, self._say)

    async def run(self, *, once: bool = False) -> int:
        """From start to clean stop; the exit status."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        status = 1
        try:
            status = await self._until(stop, once)
        except PrfaasError as exc:
            self._say(f"\n{exc.message}")
        finally:
            self._say("\nstopping")
            statuses = await self._fleet.stop()
        failed = {name: ended for name, ended in statuses.items() if ended != 0}
        for name, ended in failed.items():
            self._say(f"{name} ended with status {ended}")
        return 1 if failed else status

    async def _until(self, stop: asyncio.Event, once: bool) -> int:
        work = asyncio.create_task(self._work(once))
        watch = asyncio.create_task(self._fleet.supervisor.watch())
        asked = asyncio.create_task(stop.wait())
        tasks = {work, watch, asked}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            if work.done():
                work.result()
            return 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, once: bool) -> None:
        await self._fleet.start()
        urls = " ".join(self._plan.gateway_urls)
        self._say(f"\nready: model {self._plan.fleet.model} at {urls}; Ctrl-C stops it")
        running = ", ".join(f"{p.spec.name} {p.pid}" for p in self._fleet.supervisor.processes)
        self._say(f"running: {running}")
        await self._let_go_wrong()
        if not once:
            await asyncio.Event().wait()

    async def _let_go_wrong(self) -> None:
        """Each at its time; what is to happen to one process waits for what went before there.

        Raises PrfaasError.
        """
        began = asyncio.get_running_loop().time()
        turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

        async def carry_out(fault: FleetFault) -> None:
            async with turns[fault.what]:
                await self._fleet.carry_out(fault)

        try:
            async with asyncio.TaskGroup() as group:
                for fault in sorted(self._plan.fleet.faults, key=lambda each: each.at_s):
                    await asyncio.sleep(began + fault.at_s - asyncio.get_running_loop().time())
                    self._say(f"{fault.at_s:6.1f} s  {words(fault)}")
                    group.create_task(carry_out(fault))
        except* PrfaasError as found:
            raise _first(found) from None

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _first(found: BaseException) -> BaseException:
    """Of a group, the first error itself."""
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
