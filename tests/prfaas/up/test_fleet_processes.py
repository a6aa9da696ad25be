"""What goes wrong in a fleet on purpose, with small processes in place of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from prfaas.errors import PrfaasError
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import Fleet, FleetFault
from prfaas.up.fleet_processes import FleetProcesses
from prfaas.up.fleet_run import FleetRun
from prfaas.up.process import ProcessSpec

DRAINED = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))
fd = int(sys.argv[-1])
os.write(fd, b"4321\\n")
os.close(fd)
while True:
    signal.pause()
"""


def fault(do: str, what: str) -> FleetFault:
    return FleetFault(at_s=0, do=do, what=what)


async def test_what_is_drained_ends_by_itself_and_may_start_again(tmp_path: Path) -> None:
    fleet = Fleet(fleet_version=1, model="m", engines={"count": 1})
    made = FleetProcesses(FleetPlan.create(fleet, tmp_path / "fleet.yaml", tmp_path), print)
    for name, status in (("d-0-agent", "0"), ("d-0-engine", "3")):
        made._specs[name] = ProcessSpec(name, ("-c", DRAINED, status), tmp_path / f"{name}.log")
    await made.supervisor.start([made._specs["d-0-agent"], made._specs["d-0-engine"]], 30)
    try:
        await made.carry_out(fault("drain", "d-0-agent"))
        with pytest.raises(PrfaasError, match="drain d-0-agent: it does not run"):
            await made.carry_out(fault("drain", "d-0-agent"))
        await made.carry_out(fault("start", "d-0-agent"))
        with pytest.raises(PrfaasError, match="drain d-0-engine: it ended with status 3"):
            await made.carry_out(fault("drain", "d-0-engine"))
        assert [process.spec.name for process in made.supervisor.processes] == ["d-0-agent"]
    finally:
        await made.stop()


async def test_a_fault_that_takes_long_keeps_only_the_same_process_waiting(tmp_path: Path) -> None:
    class Scripted:
        """Starts `d-0-agent` only once `d-0-engine` was killed."""

        def __init__(self) -> None:
            self.killed = asyncio.Event()
            self.done: list[str] = []

        async def carry_out(self, fault: FleetFault) -> None:
            if fault.do == "start":
                await self.killed.wait()
            if fault.do == "kill":
                self.killed.set()
            if fault.do == "resume":
                raise PrfaasError("it does not run")
            self.done.append(f"{fault.do} {fault.what}")

    faults = [fault("start", "d-0-agent"), fault("pause", "d-0-agent"), fault("kill", "d-0-engine")]
    fleet = Fleet(fleet_version=1, model="m", engines={"count": 1})
    fleet = fleet.model_copy(update={"faults": tuple(faults)})
    plan = FleetPlan.create(fleet, tmp_path / "fleet.yaml", tmp_path)
    run, scripted = FleetRun(plan, Console()), Scripted()
    run._fleet = scripted
    await asyncio.wait_for(run._let_go_wrong(), 20)
    assert scripted.done == ["kill d-0-engine", "start d-0-agent", "pause d-0-agent"]

    fleet = fleet.model_copy(update={"faults": (*faults, fault("resume", "d-0-engine"))})
    run = FleetRun(FleetPlan.create(fleet, tmp_path / "fleet.yaml", tmp_path), Console())
    run._fleet = Scripted()
    with pytest.raises(PrfaasError, match="it does not run"):
        await asyncio.wait_for(run._let_go_wrong(), 20)
