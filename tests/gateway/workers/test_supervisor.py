"""The supervisor, with processes that do nothing but live, die and end as they are told."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.workers import supervisor as supervisor_module
from gateway.workers.supervisor import Supervisor
from prfaas.errors import ConfigError
from prfaas.settings import Settings
from prfaas.testing.waiting import eventually

LONG_S = 60.0
SCRIPT = """
import os, select, signal, sys, time
from pathlib import Path
from gateway.workers import supervisor
from gateway.workers.supervisor import Supervisor
from prfaas.errors import ConfigError
from prfaas.settings import Settings

supervisor.AGAIN_FIRST_S = 0.05
here = Path(sys.argv[1])
how = sys.argv[2:]


def say(text):
    with open(here / "said", "a") as file:
        file.write(text + "\\n")


def run(place):
    if "refuses" in how and place.index == 1:
        raise ConfigError("gateway.model: is no good")
    if "once" in how and place.index == 1 and not place.generation:
        os._exit(7)
    stops = []
    signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
    say(f"{place.name} {place.generation} {os.getpid()} {place.port}")
    os.write(place.ready_fd, b"1")
    os.close(place.ready_fd)
    while not stops or ("stubborn" in how and len(stops) < 2):
        if select.select([place.life_fd], [], [], 0.02)[0]:
            say(f"{place.name} alone")
            return
    say(f"{place.name} ends")


gateway = {"workers": 2, "port": 0, "worker_dir": here / "d"}
made = Supervisor(Settings(gateway=gateway), lambda port: say(f"ready {port}"), run, run)
try:
    made.run()
    say("over")
except Exception as exc:
    say(f"{type(exc).__name__}: {exc}")
"""


class World:
    """One supervisor in a process of its own, and what all processes said."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes]) -> None:
        self.directory = directory
        self.process = process

    @property
    def said(self) -> list[str]:
        file = self.directory / "said"
        return file.read_text().splitlines() if file.exists() else []

    def pids(self) -> dict[tuple[str, int], int]:
        """By name and how often it was started again."""
        found = (re.fullmatch(r"(\S+) (\d+) (\d+) \d+", line) for line in self.said)
        return {(m[1], int(m[2])): int(m[3]) for m in found if m is not None}

    async def until(self, line: str) -> None:
        def there() -> bool:
            return any(re.fullmatch(line, each) for each in self.said)

        await eventually(there, within_s=LONG_S)

    def ended(self) -> int:
        return self.process.wait(LONG_S)


@contextmanager
def supervised(directory: Path, *how: str) -> Iterator[World]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(directory), *how])
    try:
        yield World(directory, process)
    finally:
        process.kill()
        process.wait()


async def test_the_state_comes_first_and_goes_last(tmp_path: Path) -> None:
    with supervised(tmp_path) as world:
        await world.until(r"ready \d+")
        assert world.said[0].startswith("state 0 ")
        ports = {line.split()[-1] for line in world.said}
        assert len(ports) == 1, "one port, for all and for whoever started it"
        world.process.terminate()
        assert world.ended() == 0
        assert world.said[-2:] == ["state ends", "over"]
        assert {"worker-0 ends", "worker-1 ends"} <= set(world.said)
        assert list((tmp_path / "d").iterdir()) == []


async def test_whoever_dies_is_started_again(tmp_path: Path) -> None:
    with supervised(tmp_path) as world:
        await world.until(r"ready \d+")
        for name in ("worker-1", "state", "worker-1"):
            generation = max(number for each, number in world.pids() if each == name)
            os.kill(world.pids()[name, generation], signal.SIGKILL)
            await world.until(rf"{name} {generation + 1} \d+ \d+")
        others = [each for each in world.pids() if each[0] == "worker-0"]
        assert others == [("worker-0", 0)], "whoever lives is left alone"
        world.process.terminate()
        assert world.ended() == 0
        assert world.said.count("state ends") == 1


async def test_a_second_signal_reaches_who_still_drains(tmp_path: Path) -> None:
    with supervised(tmp_path, "stubborn") as world:
        await world.until(r"ready \d+")
        world.process.terminate()
        world.process.send_signal(signal.SIGINT)
        assert world.ended() == 0
        assert world.said[-1] == "over"


async def test_without_a_supervisor_nobody_stays(tmp_path: Path) -> None:
    with supervised(tmp_path) as world:
        await world.until(r"ready \d+")
        world.process.kill()
        for name in ("state", "worker-0", "worker-1"):
            await world.until(f"{name} alone")


@pytest.mark.parametrize("how", ["refuses", "once"])
async def test_what_cannot_start_ends_all(tmp_path: Path, how: str) -> None:
    with supervised(tmp_path, how) as world:
        world.ended()
        kind, status = ("ConfigError", 2) if how == "refuses" else ("NotStarted", 7)
        assert world.said[-1] == f"{kind}: worker-1 ended with status {status} before it served"
        pids = list(world.pids().values())
        assert pids
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def made(**fields: Any) -> Supervisor:
    settings = Settings(gateway={"workers": 2, "port": 0, **fields})
    return Supervisor(settings, lambda port: None, lambda place: None, lambda place: None)


@contextmanager
def listening(**options: int) -> Iterator[int]:
    with socket.socket() as taken:
        for name in options:
            taken.setsockopt(socket.SOL_SOCKET, getattr(socket, name), 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("options", [{}, {"SO_REUSEPORT": 1}])
def test_a_port_that_somebody_has_is_refused(options: dict[str, int], tmp_path: Path) -> None:
    with (
        listening(**options) as port,
        pytest.raises(ConfigError, match=r"gateway\.port: cannot listen on 127\.0\.0\.1:"),
    ):
        made(port=port, worker_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_system_that_shares_no_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(supervisor_module.socket, "SO_REUSEPORT")
    with pytest.raises(ConfigError, match=r"gateway\.workers: this system cannot share a port"):
        made()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"gateway\.worker_dir: cannot make a directory"):
        made(worker_dir=file / "below")


def test_a_path_too_long_for_sockets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.worker_dir: .* too long a path"):
        made(worker_dir=tmp_path / ("x" * 90))


@pytest.mark.parametrize("count", [0, -1, 65])
def test_bad_counts(count: int) -> None:
    with pytest.raises(ValueError, match="workers"):
        Settings(gateway={"workers": count})


def test_the_directory_is_private(tmp_path: Path) -> None:
    one = made(worker_dir=tmp_path)
    with contextlib.closing(one):
        (directory,) = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert one.port > 0
    assert list(tmp_path.iterdir()) == []
