"""The process that is the link: it makes the namespaces, carries frames, and cleans up after all.

`python -m bench.wanlink.emulator FD` reads a `Start` from the control socket FD and runs until that
is closed or its owner is dead, however it died.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from bench.wanlink import control, namespaces
from bench.wanlink.direction import NEVER, Direction
from bench.wanlink.packets import MAX_FRAME_BYTES
from bench.wanlink.shape import LinkChange, LinkStats
from bench.wanlink.tun import Tun

_PR_SET_TIMERSLACK = 29
_EARLY_S = 40e-6
"""A frame may arrive so much early: a short sleep ends about so much late."""

_LONG_S, _LONG_EARLY_S = 1e-3, 200e-6
"""A longer sleep of an idle core ends later: the rest of it is a second, short one."""

_REST_S = 500e-6
"""How long to look away under load."""

_LOAD_BYTES = 4096
"""Moving less is no load: then every frame is carried at once, and idle round trips are exact."""

_CONTROL_S = 0.01
"""How long a change may have to wait under load."""

_BATCH_FRAMES = 128
"""Read at most so many of one side before the other and the timers have their turn."""


class Emulator:
    """Owns both namespaces and devices and the control socket; `run` ends when the owner does."""

    def __init__(self, sock: socket.socket, start: control.Start) -> None:
        self._control = sock
        self._start = start
        self._owner = os.pidfd_open(start.owner_pid)
        self._scheduling = _schedule(start.cpu, start.realtime)
        self._worst_late_s = 0.0
        self._tuns: list[Tun] = []
        self._directions = [Direction(start.shape, start.seed + way) for way in range(2)]

    def open(self) -> None:
        """Make namespaces and devices; OSError if the machine does not let us."""
        for name, address in zip(self._start.namespaces, self._start.addresses, strict=True):
            namespaces.create(name)
            self._tuns.append(Tun(name, address, control.PREFIX_BITS, self._start.mtu))

    def close(self) -> None:
        """Kill what runs in the namespaces and remove them and the devices."""
        for name in self._start.namespaces:
            namespaces.remove(name)
        for tun in self._tuns:
            tun.close()
        os.close(self._owner)

    def run(self) -> None:
        """Carry frames until the control socket is closed or the owner is dead."""
        while self._wait():
            self._carry()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False once the owner has gone."""
        due = min(way.next_due() for way in self._directions)
        timeout = None if due == NEVER else _sleep_s(due - time.monotonic())
        tuns, ctl = [tun.fd for tun in self._tuns], self._control.fileno()
        readable = select.select([*tuns, ctl, self._owner], (), (), timeout)[0]
        now = time.monotonic()
        self._worst_late_s = max(self._worst_late_s, now - due)
        if ctl in readable:
            return self._obey(now)
        return self._owner not in readable

    def _carry(self) -> None:
        """Move what there is; under load look again after every `_REST_S`, until it is quiet.

        Looking at once for every frame would cost four wake-ups for each of them. What came during
        a rest came in the middle of it on average, and what falls due in the first half of the next
        one goes out now: times are right on average and wrong by half a rest at most.
        """
        # Local names and plain os calls: this runs a few thousand times a second.
        (tun_a, tun_b), (way_ab, way_ba) = self._tuns, self._directions
        a, b, monotonic = tun_a.fd, tun_b.fd, time.monotonic
        now = arrived = monotonic()
        until = now + _CONTROL_S
        early_s = _EARLY_S
        while True:
            moved_bytes = _read(a, way_ab, arrived) + _read(b, way_ba, arrived)
            moved_bytes += tun_b.deliver(way_ab.take_due(now + early_s))
            moved_bytes += tun_a.deliver(way_ba.take_due(now + early_s))
            if moved_bytes < _LOAD_BYTES or now > until:
                return
            looked, rest_s = now, now + _REST_S - monotonic()
            if rest_s > 0:
                time.sleep(rest_s)
            now = monotonic()
            self._worst_late_s = max(self._worst_late_s, now - looked - _REST_S)
            arrived = (looked + now) / 2
            early_s = _REST_S / 2

    def _obey(self, now: float) -> bool:
        """Apply a change and answer with the counters; False if the owner has closed."""
        try:
            change = control.receive(self._control)
        except ConnectionError:
            return False
        if change is None:
            return False
        try:
            if not isinstance(change, LinkChange):
                raise ValueError(f"{type(change).__name__} where a LinkChange belongs")
            for way, direction in zip(("ab", "ba"), self._directions, strict=True):
                if change.way in (None, way):
                    direction.change(change, now)
            control.send(self._control, self.stats())
        except ValueError as error:
            control.send(self._control, control.Failed(str(error)))
        return True

    def stats(self) -> LinkStats:
        """The counters now; how late it was counts anew from here."""
        (tun_a, tun_b), (ab, ba) = self._tuns, self._directions
        ways = ab.stats(tun_a.dropped() + tun_b.refused), ba.stats(tun_b.dropped() + tun_a.refused)
        cpu_s = time.process_time()
        worst_late_s, self._worst_late_s = self._worst_late_s, 0.0
        return LinkStats(*ways, cpu_s, worst_late_s, self._scheduling)


def _read(fd: int, way: Direction, now: float) -> int:
    """Take what the device has, up to a batch; its bytes."""
    read, accept, read_bytes = os.read, way.accept, 0
    for _ in range(_BATCH_FRAMES):
        try:
            frame = read(fd, MAX_FRAME_BYTES)
        except BlockingIOError:
            break
        accept(frame, now)
        read_bytes += len(frame)
    return read_bytes


def _sleep_s(until_due_s: float) -> float:
    early_s = _LONG_EARLY_S if until_due_s > _LONG_S else _EARLY_S
    return max(0.0, until_due_s - early_s)


def _schedule(cpu: int | None, realtime: bool) -> str:
    """Take the place that was asked for; what the process has in the end, in words."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # wake up when asked to, not 50 us later
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    if realtime:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except PermissionError:
            return "normal: real-time scheduling is not permitted"
        return "real-time"
    return "normal"


def main() -> int:
    """Run one emulator; 0 when its owner ended it."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    start = control.receive(sock)
    if not isinstance(start, control.Start):
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who closes us
    signal.signal(signal.SIGTERM, _end)
    emulator = Emulator(sock, start)
    try:
        try:
            emulator.open()
        except OSError as error:
            control.send(sock, control.Failed(str(error)))
            return 1
        control.send(sock, emulator.stats())
        gc.disable()  # the loop makes no cycles, and a collection would make frames late
        emulator.run()
    finally:
        emulator.close()
    return 0


def _end(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
