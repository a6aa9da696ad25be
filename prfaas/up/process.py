"""One child process of `prfaas up`: its log, its core, its readiness, and its certain end."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import PrfaasError

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Arguments of a Python that takes `--ready-fd` and writes its port there; `core` pins it.

    `prefix` is a command that becomes the one behind it, in the same process (`ip netns exec`).
    """

    name: str
    arguments: tuple[str, ...]
    log: Path
    core: int | None = None
    prefix: tuple[str, ...] = ()


class ProcessEnded(PrfaasError):
    """A process that should have gone on ended; the message has its last log lines."""

    kind = "process_ended"


class ManagedProcess:
    """Owns one child process, which dies with this one whatever happens; `stop` ends it."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.StreamReader | None = None
        self._was_ready = False
        self._ready_transport: asyncio.ReadTransport | None = None

    def __repr__(self) -> str:
        process = self._process
        state = "NEW" if process is None else "RUNNING"
        if process is not None and process.returncode is not None:
            state = f"ENDED {process.returncode}"
        return f"<Process {self.spec.name} {state} pid={process.pid if process else None}>"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it; its output goes to its log, and it tells its port when it is ready."""
        reader_fd, writer_fd = os.pipe()
        try:
            with self.spec.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(*self.spec.prefix, sys.executable, *self.spec.arguments),
                    *("--ready-fd", str(writer_fd)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_environment(os.environ),
                    pass_fds=(writer_fd,),
                    preexec_fn=_child_setup(os.getpid(), self.spec.core),
                )
        finally:
            os.close(writer_fd)
        self._ready = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self._ready)
        self._ready_transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: protocol, os.fdopen(reader_fd, "rb")
        )

    async def wait_ready(self, timeout_s: float) -> int:
        """The port it serves. Raises ProcessEnded if it ends first or takes too long."""
        assert self._ready is not None
        try:
            line = await asyncio.wait_for(self._ready.readline(), timeout_s)
        except TimeoutError:
            raise self._error(f"was not ready within {timeout_s:.0f} s") from None
        if not line:
            await self.wait()
            raise self.ended_error()
        self._was_ready = True
        return int(line)

    async def wait(self) -> int:
        """Its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace_s: float) -> int | None:
        """End it: SIGTERM, then SIGKILL after `grace_s`. Its exit status; None if never started.

        Until it is ready the signal itself may end it, which is a clean end too: 0.
        """
        if self._ready_transport is not None:
            self._ready_transport.close()
        if self._process is None:
            return None
        try:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # one that was frozen ends in order too
            status = await asyncio.wait_for(self.wait(), grace_s)
            return 0 if status == -signal.SIGTERM and not self._was_ready else status
        except TimeoutError:
            return await self.kill()
        except asyncio.CancelledError:
            await self.kill()
            raise

    def pause(self, paused: bool) -> None:
        """Freeze it, or let it go on."""
        self._signal(signal.SIGSTOP if paused else signal.SIGCONT)

    async def kill(self) -> int:
        """End it now."""
        self._signal(signal.SIGKILL)
        return 0 if self._process is None else await self.wait()

    def ended_error(self) -> ProcessEnded:
        """Says that it ended, how, and with which last words."""
        status = None if self._process is None else self._process.returncode
        return self._error(f"ended with status {status}")

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            with self.spec.log.open(errors="replace") as log:
                return "".join(deque(log, _TAIL_LINES)).rstrip()
        except OSError as exc:
            return f"(no log: {exc.strerror})"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                pass

    def _error(self, what: str) -> ProcessEnded:
        lines = self.tail() or "(its log is empty)"
        return ProcessEnded(f"{self.spec.name} {what}; the end of its log:\n{lines}")


def _environment(current: Mapping[str, str]) -> dict[str, str]:
    """This environment less our settings, which are in the child's file already."""
    kept = {name: value for name, value in current.items() if not name.startswith("PRFAAS_")}
    return kept | {"PYTHONUNBUFFERED": "1"}


def _child_setup(parent: int, core: int | None) -> Callable[[], None]:
    """What runs in the child before its program: it may not import, so all is loaded here."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def setup() -> None:
        # A group of its own: Ctrl-C reaches this process only, which stops the others in order.
        os.setsid()
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
        if core is not None:
            os.sched_setaffinity(0, {core})

    return setup
