"""What goes wrong in a fleet on purpose, with small processes in place of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.errors import PrfaasError
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import Fleet, FleetFault
from prfaas.up.fleet_processes import FleetProcesses
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
