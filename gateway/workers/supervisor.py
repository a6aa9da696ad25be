"""Starts the processes of one gateway, starts them again when they die, and stops them in order."""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.workers.place import MAX_PATH_BYTES, Place, name_of
from prfaas.errors import ConfigError, PrfaasError
from prfaas.settings import Settings

logger = logging.getLogger(__name__)

READY_S = 120.0
"""A process that does not serve after so long is ended, and started again."""
AGAIN_FIRST_S, AGAIN_MOST_S = 0.1, 10.0
"""Before a process that died is started again: twice as long each time it dies young."""
YOUNG_S = 30.0
GRACE_S = 5.0
"""After the drain, before a process is killed."""
LOOK_S = 0.5
CONFIG_STATUS = 2
"""Of a process whose settings are wrong."""

Run = Callable[[Place], None]


class NotStarted(PrfaasError):
    """A process of the gateway ended before it served; its own error was printed."""

    kind = "worker_not_started"


@dataclass(slots=True)
class _Child:
    index: int
    generation: int = -1
    pid: int = 0
    """0: it is not running."""
    started_at: float = 0.0
    ready_fd: int = -1
    ready: bool = False
    again_at: float = 0.0
    again_s: float = AGAIN_FIRST_S
    served: bool = False
    """Some time."""


class Supervisor:
    """Owns the processes, their directory and the hold on the port. Single-threaded and without an
    event loop, so that it can fork; it imports nothing heavy. `run` returns when all has ended.
    """

    def __init__(
        self, settings: Settings, ready: Callable[[int], None], state: Run, worker: Run
    ) -> None:
        """`state` and `worker` are what the processes run. Raises ConfigError."""
        gateway = settings.gateway
        self._workers = gateway.workers
        self._drain_s = settings.limits.drain_timeout_s
        self._ready = ready
        self._run = {True: state, False: worker}
        if not hasattr(socket, "SO_REUSEPORT"):
            raise ConfigError(
                "gateway.workers: this system cannot share a port among processes "
                "(SO_REUSEPORT); use 1",
                field="gateway.workers",
            )
        self._directory = _directory(gateway.worker_dir)
        try:
            self._holds = _hold_port(gateway.host, gateway.port)
        except OSError as exc:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise ConfigError(
                f"gateway.port: cannot listen on {gateway.host}:{gateway.port}: {exc.strerror}",
                field="gateway.port",
            ) from exc
        self.port = int(self._holds[0].getsockname()[1])
        self._children = [_Child(index) for index in range(-1, self._workers)]
        self._life: tuple[int, int] = (-1, -1)
        """Ends in the children when this process does."""
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._stops = 0
        self._told_stops = 0
        self._stop_by = 0.0
        self._told_ready = False

    def run(self) -> None:
        """Until a signal and the drain after it. Raises NotStarted where a process cannot start,
        and ConfigError where that is by its settings.
        """
        self._life = os.pipe()
        self._wake = socket.socketpair()
        for end in self._wake:
            end.setblocking(False)
        before = {
            number: signal.signal(number, self._signalled)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        }
        signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
        try:
            self._loop()
        finally:
            for child in self._children:
                if child.pid:  # after an error of our own
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            for end in self._wake:
                end.close()
            for end_fd in self._life:
                os.close(end_fd)
            self.close()

    def close(self) -> None:
        """Give port and directory back; `run` does it too."""
        for held in self._holds:
            held.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    # --- the loop ---

    def _loop(self) -> None:
        while True:
            self._reap()
            if self._stops:
                if self._stopped():
                    return
            else:
                self._start_missing()
            self._wait()

    def _wait(self) -> None:
        """For a signal, or for somebody to be ready."""
        assert self._wake is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake[0], selectors.EVENT_READ)
            for child in self._children:
                if child.ready_fd >= 0:
                    selector.register(child.ready_fd, selectors.EVENT_READ, child)
            for key, _ in selector.select(LOOK_S if self._told_ready else 0.05):
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._wake[0].recv(4096)
                else:
                    self._heard(key.data)

    def _heard(self, child: _Child) -> None:
        told = os.read(child.ready_fd, 1)
        os.close(child.ready_fd)
        child.ready_fd = -1
        if told:
            child.ready = child.served = True
        if not self._told_ready and all(each.served for each in self._children):
            self._told_ready = True
            logger.info("%d workers serve on port %d", self._workers, self.port)
            self._ready(self.port)

    def _start_missing(self) -> None:
        """The state first: nobody else can begin without it."""
        now = time.monotonic()
        for child in self._children:
            if not child.pid and child.again_at <= now and self._state_is_there(child):
                self._start(child, now)
            elif child.pid and not child.ready and now - child.started_at > READY_S:
                logger.error("%s does not come to serve: killed", name_of(child.index))
                os.kill(child.pid, signal.SIGKILL)

    def _state_is_there(self, child: _Child) -> bool:
        return child.index < 0 or self._children[0].served

    def _start(self, child: _Child, now: float) -> None:
        child.generation += 1
        child.started_at, child.ready = now, False
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            self._be(child, reader, writer)
        os.close(writer)
        child.pid, child.ready_fd = pid, reader

    def _be(self, child: _Child, reader: int, writer: int) -> None:
        """In the new process, which never returns from here."""
        status = 1
        try:
            assert self._wake is not None
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            # A group of its own: Ctrl-C reaches the supervisor only, which stops all in order.
            os.setpgid(0, 0)
            os.close(reader)
            os.close(self._life[1])
            for each in self._children:
                if each.ready_fd >= 0:
                    os.close(each.ready_fd)
            for held in (*self._wake, *self._holds):
                held.close()
            place = Place(
                child.index,
                self._workers,
                child.generation,
                self._directory,
                self.port,
                self._life[0],
                writer,
            )
            self._run[child.index < 0](place)
            status = 0
        except PrfaasError as exc:
            text = " ".join(exc.message.split())
            print(f"prfaas: {name_of(child.index)}: {text}", file=sys.stderr)
            status = CONFIG_STATUS if isinstance(exc, ConfigError) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            logging.shutdown()
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        for child in self._children:
            if not child.pid:
                continue
            pid, raw = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._ended(child, os.waitstatus_to_exitcode(raw))

    def _ended(self, child: _Child, status: int) -> None:
        name, pid, lived_s = name_of(child.index), child.pid, time.monotonic() - child.started_at
        if child.ready_fd >= 0:
            self._heard(child)
        child.pid, child.ready = 0, False
        if self._stops:
            return
        if not child.served:
            text = f"{name} ended with status {status} before it served"
            raise ConfigError(text) if status == CONFIG_STATUS else NotStarted(text)
        child.again_s = AGAIN_FIRST_S if lived_s > YOUNG_S else child.again_s
        logger.error(
            "%s (process %d) ended with status %d: started again in %g s",
            name,
            pid,
            status,
            child.again_s,
        )
        child.again_at = time.monotonic() + child.again_s
        child.again_s = min(2 * child.again_s, AGAIN_MOST_S)

    # --- stopping ---

    def _signalled(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._stops += 1

    def _stopped(self) -> bool:
        """Workers first, which drain, then the state that they need for that."""
        now = time.monotonic()
        if not self._told_stops:
            self._stop_by = now + self._drain_s + GRACE_S
        workers = [child for child in self._children[1:] if child.pid]
        while self._told_stops < min(self._stops, 2):  # at the second they stop at once
            self._told_stops += 1
            for child in workers:
                os.kill(child.pid, signal.SIGTERM)
        if workers:
            if now > self._stop_by:
                for child in workers:
                    logger.error("%s does not end: killed", name_of(child.index))
                    os.kill(child.pid, signal.SIGKILL)
                self._stop_by = now + GRACE_S
            return False
        state = self._children[0]
        if not state.pid:
            return True
        os.kill(state.pid, signal.SIGTERM)
        if now > self._stop_by + GRACE_S:
            os.kill(state.pid, signal.SIGKILL)
        return False


def _hold_port(host: str, port: int) -> list[socket.socket]:
    """Sockets that keep the port for all workers and take no connections.

    Raises OSError where somebody else has it: also where that one would share it.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    holds: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if holds and not port:  # one port for all addresses
                address = (address[0], holds[0].getsockname()[1], *address[2:])
            if address[1]:
                with socket.socket(family, kind, protocol) as alone:
                    _prepare(alone, family)
                    alone.bind(address)
            held = socket.socket(family, kind, protocol)
            holds.append(held)
            _prepare(held, family)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(address)
    except BaseException:
        for held in holds:
            held.close()
        raise
    return holds


def _prepare(sock: socket.socket, family: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)


def _directory(chosen: Path | None) -> Path:
    """Where the processes meet, for this user alone. Raises ConfigError."""
    try:
        if chosen is not None:
            chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="prfaas-", dir=chosen))
    except OSError as exc:
        where = chosen if chosen is not None else tempfile.gettempdir()
        raise ConfigError(
            f"gateway.worker_dir: cannot make a directory in {where}: {exc.strerror}",
            field="gateway.worker_dir",
        ) from exc
    if len(os.fsencode(made / "worker-00.sock")) > MAX_PATH_BYTES:
        shutil.rmtree(made, ignore_errors=True)
        raise ConfigError(
            f"gateway.worker_dir: {made.parent} is too long a path for unix sockets; name a "
            "shorter one",
            field="gateway.worker_dir",
        )
    return made
