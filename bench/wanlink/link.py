"""The owner's side of a link: start, change, run commands in its namespaces, close."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bench.wanlink import control, namespaces, tcp
from bench.wanlink.measure import LinkReport, Transfer, measure
from bench.wanlink.shape import (
    SIDES,
    LinkChange,
    LinkShape,
    LinkStats,
    Side,
    Way,
    default_queue_bytes,
)
from bench.wanlink.tcp import TcpSettings
from bench.wanlink.tun import NODE

REPOSITORY = Path(__file__).resolve().parents[2]

_ADDRESSES = ("198.18.0.1", "198.18.0.2")  # RFC 2544: for benchmarks, never routed
_ANSWER_S = 10.0
_END_S = 5.0


def available() -> str | None:
    """None where links can be made, else the reason why not, with what mends it."""
    if not sys.platform.startswith("linux"):
        return "network namespaces and TUN devices are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        namespaces.ip_path()
        if not Path(NODE).exists():
            return f"no {NODE}: mkdir -p /dev/net && mknod {NODE} c 10 200"
        os.close(os.open(NODE, os.O_RDWR | os.O_CLOEXEC))
        probe = namespaces.new_name(os.getpid())
        try:
            namespaces.create(probe)
        finally:
            namespaces.remove(probe)
    except OSError as error:
        return str(error)
    return None


class WanLink:
    """Two namespaces, `a` and `b`, joined by a link; owns all that runs in them.

    A context manager, or `start` and `close`. Every process of `run_in` ends with it, at the latest
    when this process does. One thread may change it while another runs commands.
    """

    def __init__(
        self,
        rate_bits: float,
        rtt_ms: float,
        queue_bytes: int | None = None,
        loss: float = 0.0,
        *,
        seed: int = 0,
        mtu: int = 1500,
        cpu: int | None = None,
        realtime: bool = True,
        tcp_settings: TcpSettings | None = None,
    ) -> None:
        """Both directions alike; `set` with a way makes them differ.

        queue_bytes (each direction, wire bytes) is one bandwidth-delay product and at least 256 KiB
        by default and stays as it is when rate or delay change. cpu pins the emulator. realtime
        lets it run before other processes, which holds the timing on a busy machine.
        """
        if queue_bytes is None:
            queue_bytes = default_queue_bytes(rate_bits, rtt_ms)
        if not 576 <= mtu <= 65535:
            raise ValueError(f"mtu must be from 576 to 65535, not {mtu}")
        name = namespaces.new_name(os.getpid())
        self._start = control.Start(
            owner_pid=os.getpid(),
            namespaces=(f"{name}-a", f"{name}-b"),
            addresses=_ADDRESSES,
            shape=LinkShape(rate_bits, rtt_ms / 2e3, queue_bytes, loss),
            mtu=mtu,
            seed=seed,
            cpu=cpu,
            realtime=realtime,
        )
        self._rate_bits = rate_bits
        self._tcp = tcp_settings or TcpSettings()
        self._emulator: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._asking = threading.Lock()
        self._processes: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        shape, state = self._start.shape, "up" if self._control else "down"
        rate, rtt = shape.rate_bits / 1e6, shape.delay_s * 2e3
        return f"<WanLink {self._start.namespaces[0][:-2]} {state} {rate:g} Mbit/s {rtt:g} ms>"

    def __enter__(self) -> WanLink:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Remove what dead owners left, then bring the link up; OSError says why it cannot."""
        if self._emulator is not None:
            raise RuntimeError(f"{self!r} was started before")
        namespaces.remove_leftovers()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_ANSWER_S)
        self._control = ours
        try:
            with theirs:
                self._emulator = subprocess.Popen(
                    [sys.executable, "-S", "-m", "bench.wanlink.emulator", str(theirs.fileno())],
                    cwd=REPOSITORY,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C must not end it before it has cleaned up
                )
            self._ask(self._start)
            self.apply_tcp(self._tcp)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process and remove everything; may be called again."""
        for process in self._processes:
            process.kill()  # one that has not entered its namespace yet, the emulator cannot find
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._emulator is not None:
            try:
                self._emulator.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._emulator.kill()
                self._emulator.wait()
        for name in self._start.namespaces:  # only if the emulator was killed
            namespaces.remove(name)
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._processes.clear()

    @property
    def rate_bits(self) -> float:
        """The nominal rate from a to b, as it was set last."""
        return self._rate_bits

    def address(self, side: Side) -> str:
        """The IPv4 address of that side on the link."""
        return self._start.addresses[SIDES.index(side)]

    def namespace(self, side: Side) -> str:
        """The name that `ip netns` knows that side by."""
        return self._start.namespaces[SIDES.index(side)]

    def command_in(self, side: Side, argv: list[str]) -> list[str]:
        """The command that runs argv on that side, for those who start processes themselves."""
        return namespaces.command_in(self.namespace(side), argv)

    def run_in(
        self,
        side: Side,
        argv: list[str],
        env: dict[str, str] | None = None,
        *,
        cwd: str | Path | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start argv on that side; the process is argv itself and ends with the link at latest."""
        if self._control is None:
            raise RuntimeError(f"{self!r} is not up")
        process = subprocess.Popen(
            self.command_in(side, argv), env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr
        )
        self._processes.append(process)
        return process

    def set(
        self,
        *,
        way: Way | None = None,
        rate_bits: float | None = None,
        rtt_ms: float | None = None,
        queue_bytes: int | None = None,
        loss: float | None = None,
        blackhole: bool | None = None,
        stall: bool | None = None,
    ) -> LinkStats:
        """Change the link as of now (see `LinkChange`); the counters at that moment."""
        change = LinkChange(way, rate_bits, rtt_ms, queue_bytes, loss, blackhole, stall)
        stats = self._ask(change)
        if rate_bits is not None and way != "ba":
            self._rate_bits = rate_bits
        return stats

    def drop_for(self, drop_ms: float, way: Way | None = None) -> LinkStats:
        """Drop everything for so long, what is on its way too; returns at once."""
        return self._ask(LinkChange(way, drop_ms=drop_ms))

    def stats(self) -> LinkStats:
        """The counters now."""
        return self._ask(LinkChange())

    def apply_tcp(self, settings: TcpSettings) -> None:
        """Set them on both sides, for sockets from now on."""
        for name, address in zip(self._start.namespaces, self._start.addresses, strict=True):
            tcp.apply(settings, name, address, control.PREFIX_BITS)

    def transfer(self, sender: Side = "a", connections: int = 1) -> Transfer:
        """Start bulk TCP from that side to the other; the caller closes it."""
        return Transfer(self, sender, connections)

    def measure(self, seconds: float = 2.0, connections: tuple[int, ...] = (1, 4)) -> LinkReport:
        """What real TCP gets out of the link now; takes a few seconds more for warm-up and RTT."""
        return measure(self, seconds, connections)

    def _ask(self, message: control.Start | LinkChange) -> LinkStats:
        with self._asking:
            if self._control is None:
                raise RuntimeError(f"{self!r} is not up")
            try:
                control.send(self._control, message)
                answer = control.receive(self._control)
            except OSError:  # a late answer would be taken for that of the next question
                self._control.close()
                self._control = None
                raise
        if isinstance(answer, LinkStats):
            return answer
        if isinstance(answer, control.Failed):
            if isinstance(message, LinkChange):
                raise ValueError(answer.reason)
            raise OSError(answer.reason)
        raise OSError("the emulator ended without an answer")
