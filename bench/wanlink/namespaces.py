"""Network namespaces named after the process they are for: made, entered, emptied and removed."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "prfaas-wl-"

_NETNS_DIR = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_COMMAND_S = 10.0
_EXIT_S = 2.0


def new_name(owner_pid: int) -> str:
    """A name of its own for a link of the process `owner_pid`; sides append theirs."""
    return f"{PREFIX}{owner_pid}-{secrets.token_hex(3)}"


def create(name: str) -> None:
    """Make the namespace and put its loopback up; OSError with what `ip` said if it cannot."""
    run_ip("netns", "add", name)
    run_ip("-n", name, "link", "set", "lo", "up")


def exists(name: str) -> bool:
    return (_NETNS_DIR / name).exists()


def remove(name: str) -> None:
    """Kill every process in the namespace and delete it; nothing if there is none."""
    try:
        identity = _identity(_NETNS_DIR / name)
    except FileNotFoundError:
        return
    _kill_all(identity)
    try:
        run_ip("netns", "delete", name)
    except OSError:
        if exists(name):  # else another one was faster
            raise
    _kill_all(identity)  # who was about to enter when we looked first; now nobody can


def _kill_all(identity: tuple[int, int]) -> None:
    deadline = time.monotonic() + _EXIT_S
    while (pids := _processes_in(identity)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)


def _processes_in(identity: tuple[int, int]) -> list[int]:
    """Pids of the living processes, but for this one, with that network namespace."""
    pids = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            theirs = _identity(Path(entry.path) / "ns" / "net")  # a zombie has none
        except OSError:
            continue
        if theirs == identity:
            pids.append(int(entry.name))
    return pids


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def remove_leftovers() -> list[str]:
    """Remove the namespaces of owners that are dead; their names."""
    removed = []
    for path in _NETNS_DIR.glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove(path.name)
            removed.append(path.name)
    return removed


@contextmanager
def entered(name: str) -> Iterator[None]:
    """This thread is in the namespace inside the block; others of the process stay outside."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(_NETNS_DIR / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set_namespace(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _set_namespace(home)
    finally:
        os.close(home)


def command_in(name: str, argv: list[str]) -> list[str]:
    """The command that runs argv in the namespace, in the same process (`ip` execs it)."""
    return [ip_path(), "netns", "exec", name, *argv]


def run_ip(*args: str) -> None:
    """Run `ip`; OSError with its words if it fails."""
    done = subprocess.run(
        [ip_path(), *args], capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip() or f'exit {done.returncode}'}")


def ip_path() -> str:
    """Where `ip` is, also for a PATH without the sbin directories; OSError if nowhere."""
    path = shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise OSError("no ip command: install iproute2 (apt-get install -y iproute2)")
    return path


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is new in Python 3.12
    if libc.setns(fd, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")
