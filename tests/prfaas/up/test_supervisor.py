"""The supervisor: ready, watched, stopped in order, and no process outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from prfaas.up.process import ManagedProcess, ProcessEnded, ProcessSpec
from prfaas.up.supervisor import Supervisor

_SERVES = """
import os, signal, sys, time
def end(*_):
    with open(sys.argv[1], "a") as order:
        order.write(sys.argv[2])
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else end)
print("serving", os.environ.get("PRFAAS_ENGINE__PORT", "clean"), flush=True)
fd = int(sys.argv[-1])
os.write(fd, b"4321\\n")
os.close(fd)
time.sleep(60)
"""


def spec(
    tmp_path: Path, name: str, program: str = _SERVES, *words: str, core: int | None = None
) -> ProcessSpec:
    arguments = ("-c", program, str(tmp_path / "order"), name, *words)
    return ProcessSpec(name, arguments, tmp_path / f"{name}.log", core)


async def test_ready_processes_tell_their_port_and_stop_last_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRFAAS_ENGINE__PORT", "1")
    async with Supervisor(stop_grace_s=10) as supervisor:
        await supervisor.start([spec(tmp_path, "a"), spec(tmp_path, "b")], 20)
        await supervisor.start([spec(tmp_path, "c")], 20)
        assert [repr(p).split(" pid")[0] for p in supervisor.processes] == [
            "<Process a RUNNING",
            "<Process b RUNNING",
            "<Process c RUNNING",
        ]
    assert (tmp_path / "order").read_text() == "cba"
    assert (tmp_path / "a.log").read_text() == "serving clean\n"


async def test_a_process_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    async with Supervisor(stop_grace_s=10) as supervisor:
        await supervisor.start([spec(tmp_path, "a"), spec(tmp_path, "b")], 20)
        watch = asyncio.create_task(supervisor.watch())
        os.kill(supervisor.processes[1].pid, signal.SIGKILL)
        with pytest.raises(ProcessEnded, match=r"(?s)b ended with status -9.*serving clean"):
            await asyncio.wait_for(watch, 10)


async def test_a_process_stopped_on_purpose_is_no_death(tmp_path: Path) -> None:
    async with Supervisor(stop_grace_s=10) as supervisor:
        await supervisor.start([spec(tmp_path, "a"), spec(tmp_path, "b")], 20)
        assert await supervisor.stop("a") == 0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(supervisor.watch(), 0.2)


async def test_failing_to_start_stops_the_others(tmp_path: Path) -> None:
    broken = "import sys; print('no such model'); sys.exit(3)"
    async with Supervisor(stop_grace_s=10) as supervisor:
        with pytest.raises(ProcessEnded, match=r"(?s)b ended with status 3.*no such model"):
            await supervisor.start([spec(tmp_path, "a"), spec(tmp_path, "b", broken)], 20)
        pids = [process.pid for process in supervisor.processes]
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_not_ready_in_time_is_an_error(tmp_path: Path) -> None:
    slow = "import time; time.sleep(60)"
    async with Supervisor(stop_grace_s=10) as supervisor:
        with pytest.raises(ProcessEnded, match="a was not ready within 0 s"):
            await supervisor.start([spec(tmp_path, "a", slow)], 0.2)


async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    supervisor = Supervisor(stop_grace_s=0.3)
    await supervisor.start([spec(tmp_path, "a", _SERVES, "stubborn")], 20)
    assert await supervisor.stop_all() == {"a": -signal.SIGKILL}


async def test_a_process_that_is_frozen_ends_in_order_too(tmp_path: Path) -> None:
    supervisor = Supervisor(stop_grace_s=30)
    await supervisor.start([spec(tmp_path, "a", _SERVES)], 20)
    supervisor.find("a").pause(True)
    assert await supervisor.stop_all() == {"a": 0}


async def test_a_process_stopped_before_it_is_ready_ended_cleanly(tmp_path: Path) -> None:
    process = ManagedProcess(spec(tmp_path, "a", "import time; time.sleep(60)"))
    await process.start()
    assert await process.stop(10) == 0


async def test_a_second_signal_forces(tmp_path: Path) -> None:
    supervisor = Supervisor(stop_grace_s=60)
    specs = [spec(tmp_path, name, _SERVES, "stubborn") for name in "ab"]
    await supervisor.start(specs, 20)
    pids = [process.pid for process in supervisor.processes]
    stopping = asyncio.create_task(supervisor.stop_all())
    await asyncio.sleep(0.1)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(stopping, 10)
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_pinned_process_stays_on_its_core(tmp_path: Path) -> None:
    core = sorted(os.sched_getaffinity(0))[-1]
    process = ManagedProcess(spec(tmp_path, "a", core=core))
    await process.start()
    try:
        assert await process.wait_ready(20) == 4321
        assert psutil.Process(process.pid).cpu_affinity() == [core]
    finally:
        await process.stop(10)


_KILLED_OWNER = """
import asyncio, sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from prfaas.up.process import ManagedProcess, ProcessSpec

async def main():
    child = ManagedProcess(ProcessSpec("c", ("-c", sys.argv[2], "x", "c"), Path(sys.argv[3])))
    await child.start()
    await child.wait_ready(20)
    print(child.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    owner = subprocess.Popen(
        [sys.executable, "-c", _KILLED_OWNER, root, _SERVES, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its supervisor"
        time.sleep(0.02)


async def test_a_prefix_becomes_the_process_and_dies_as_one(tmp_path: Path) -> None:
    prefixed = replace(spec(tmp_path, "a"), prefix=("nice", "-n", "3"))
    async with Supervisor(stop_grace_s=10) as supervisor:
        await supervisor.start([prefixed], 20)
        (process,) = supervisor.processes
        assert psutil.Process(process.pid).nice() == os.nice(0) + 3
        assert psutil.Process(process.pid).cmdline()[0] == sys.executable
    assert (tmp_path / "order").read_text() == "a"
