"""`prfaas up --fleet FILE`: start a fleet, keep it up, and let go wrong what its file says."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from prfaas.errors import ConfigError, PrfaasError
from prfaas.testing.link import LinkShape
from prfaas.testing.link_process import LinkProcess
from prfaas.up.client import OpenAIClient
from prfaas.up.cluster import paired, wait_cluster
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import FleetFault, FleetLink, read_fleet
from prfaas.up.process import ProcessSpec
from prfaas.up.stack import READY_TIMEOUT_S
from prfaas.up.supervisor import Supervisor

AT_ONCE = 8
"""Processes that start together: each takes a second or two of a core."""
PAIRED_TIMEOUT_S = 120.0
_STOP_MARGIN_S = 5.0
_CLIENT_TIMEOUT_S = 30.0


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
        self._specs = {
            spec.name: spec
            for spec in (*plan.prefill_side(), *plan.decode_side(), *plan.gateways())
        }
        self._links: dict[str, LinkProcess] = {}
        grace_s = plan.base.limits.drain_timeout_s + _STOP_MARGIN_S
        self._supervisor = Supervisor(stop_grace_s=grace_s)

    async def run(self, *, once: bool = False) -> int:
        """From start to clean stop; the exit status."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        status = 1
        async with AsyncExitStack() as lines:
            try:
                status = await self._until(stop, once, lines)
            except PrfaasError as exc:
                self._say(f"\n{exc.message}")
            finally:
                self._say("\nstopping")
                statuses = await self._supervisor.stop_all()
        failed = {name: ended for name, ended in statuses.items() if ended != 0}
        for name, ended in failed.items():
            self._say(f"{name} ended with status {ended}")
        return 1 if failed else status

    async def _until(self, stop: asyncio.Event, once: bool, lines: AsyncExitStack) -> int:
        work = asyncio.create_task(self._work(once, lines))
        watch = asyncio.create_task(self._supervisor.watch())
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

    async def _work(self, once: bool, lines: AsyncExitStack) -> None:
        await self._draw_lines(lines)
        specs = list(self._specs.values())
        gateways = specs[-self._plan.fleet.gateways :]
        for group in (*_groups(specs[: -len(gateways)], AT_ONCE), gateways):
            self._say(f"starting {', '.join(spec.name for spec in group)}")
            await self._supervisor.start(group, READY_TIMEOUT_S)
        await self._wait_paired()
        urls = " ".join(self._plan.gateway_urls)
        self._say(f"\nready: model {self._plan.fleet.model} at {urls}; Ctrl-C stops it")
        running = ", ".join(f"{p.spec.name} {p.pid}" for p in self._supervisor.processes)
        self._say(f"running: {running}")
        began = asyncio.get_running_loop().time()
        for fault in sorted(self._plan.fleet.faults, key=lambda each: each.at_s):
            await asyncio.sleep(began + fault.at_s - asyncio.get_running_loop().time())
            self._say(f"{fault.at_s:6.1f} s  {_words(fault)}")
            await self._carry_out(fault)
        if not once:
            await asyncio.Event().wait()

    async def _draw_lines(self, lines: AsyncExitStack) -> None:
        """One line for each peer, with a port for each of its instances."""
        for each in self._plan.instances:
            link = self._links.get(each.peer.name)
            if link is not None:
                await link.forward("127.0.0.1", each.port, listen_port=each.line_port)
                continue
            shape = _shape(each.peer.link)
            link = LinkProcess("127.0.0.1", each.port, shape, listen_port=each.line_port)
            self._links[each.peer.name] = await lines.enter_async_context(link)

    async def _wait_paired(self) -> None:
        """Every gateway sees every engine ready, and paired with every instance."""
        for url in self._plan.gateway_urls:
            async with OpenAIClient(url, timeout_s=_CLIENT_TIMEOUT_S) as gateway:
                await wait_cluster(
                    gateway,
                    "all engines and instances",
                    lambda cluster: all(
                        engine["local"]["load"]["age_s"] < cluster["max_age_s"]
                        and (not self._plan.instances or paired(engine))
                        for engine in cluster["engines"]
                    ),
                    PAIRED_TIMEOUT_S,
                )

    async def _carry_out(self, fault: FleetFault) -> None:
        """Raises PrfaasError where it does not fit how things stand."""
        try:
            if fault.do == "link":
                link = self._links[fault.what]
                if fault.link is not None:
                    await link.set_shape(_shape(fault.link))
                if fault.drop:
                    await link.drop_connections()
            elif fault.do == "start":
                await self._supervisor.start((self._specs[fault.what],), READY_TIMEOUT_S)
            elif fault.do == "kill":
                await self._supervisor.kill(fault.what)
            else:
                self._supervisor.find(fault.what).pause(fault.do == "pause")
        except KeyError as exc:
            raise PrfaasError(f"{_words(fault)}: it does not run") from exc

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _groups(specs: Sequence[ProcessSpec], size: int) -> list[Sequence[ProcessSpec]]:
    return [specs[at : at + size] for at in range(0, len(specs), size)]


def _shape(link: FleetLink) -> LinkShape:
    return LinkShape(link.mbit_s * 1e6, link.rtt_ms / 1e3)


def _words(fault: FleetFault) -> str:
    parts = [fault.do, fault.what]
    if fault.link is not None:
        parts.append(f"{fault.link.mbit_s:g} Mbit/s, {fault.link.rtt_ms:g} ms")
    if fault.drop:
        parts.append("connections reset")
    return " ".join(parts)
