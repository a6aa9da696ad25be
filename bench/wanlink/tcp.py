"""TCP settings of a link's namespaces; the root namespace is left as it was found."""

from __future__ import annotations

import fcntl
import socket
from dataclasses import dataclass
from pathlib import Path

from bench.wanlink import namespaces
from bench.wanlink.tun import DEVICE

_IPV4 = Path("/proc/sys/net/ipv4")
_LOCK = Path("/run/prfaas-wanlink.lock")


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """What sockets in both namespaces start with; None leaves what the kernel gives.

    congestion_control may be one that exists but that the machine does not allow yet (cubic, where
    bbr is the default). wmem and rmem are min, default and max bytes. initcwnd is in packets and
    sets both the first window sent and the first one offered.
    """

    congestion_control: str | None = None
    no_metrics_save: bool = True
    slow_start_after_idle: bool | None = None
    wmem: tuple[int, int, int] | None = None
    rmem: tuple[int, int, int] | None = None
    initcwnd: int | None = None

    def __post_init__(self) -> None:
        for name in ("wmem", "rmem"):
            sizes = getattr(self, name)
            if sizes is not None and not 4096 <= sizes[0] <= sizes[1] <= sizes[2]:
                raise ValueError(f"{name} must be min <= default <= max from 4096, not {sizes}")
        if self.initcwnd is not None and self.initcwnd < 1:
            raise ValueError(f"initcwnd must be at least 1, not {self.initcwnd}")


def apply(settings: TcpSettings, namespace: str, address: str, prefix_bits: int) -> None:
    """Set them in a namespace; OSError or ValueError names what the kernel does not have."""
    values = {"tcp_no_metrics_save": str(int(settings.no_metrics_save))}
    if settings.slow_start_after_idle is not None:
        values["tcp_slow_start_after_idle"] = str(int(settings.slow_start_after_idle))
    for name in ("wmem", "rmem"):
        sizes = getattr(settings, name)
        if sizes is not None:
            values[f"tcp_{name}"] = " ".join(map(str, sizes))
    with namespaces.entered(namespace):
        for name, value in values.items():
            (_IPV4 / name).write_text(value)
    if settings.congestion_control is not None:
        _set_congestion_control(settings.congestion_control, namespace)
    if settings.initcwnd is not None:
        window = ("initcwnd", str(settings.initcwnd), "initrwnd", str(settings.initcwnd))
        network = f"{_network(address, prefix_bits)}/{prefix_bits}"
        route = (network, "dev", DEVICE, "proto", "kernel", "scope", "link", "src", address)
        namespaces.run_ip("-n", namespace, "route", "replace", *route, *window)


def congestion_control(sock: socket.socket) -> str:
    """What this socket really uses, read back from the kernel."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def _set_congestion_control(name: str, namespace: str) -> None:
    """Only what the root namespace allows can be a default elsewhere: allowed for that moment."""
    with namespaces.entered(namespace):
        available = (_IPV4 / "tcp_available_congestion_control").read_text().split()
    if name not in available:
        raise ValueError(f"congestion control {name!r} is not one of {', '.join(available)}")
    allowed_path = _IPV4 / "tcp_allowed_congestion_control"
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        allowed = allowed_path.read_text().split()
        try:
            if name not in allowed:
                allowed_path.write_text(" ".join([*allowed, name]))
            with namespaces.entered(namespace):
                (_IPV4 / "tcp_congestion_control").write_text(name)
        finally:
            if name not in allowed:
                allowed_path.write_text(" ".join(allowed))


def _network(address: str, prefix_bits: int) -> str:
    number = int.from_bytes(socket.inet_aton(address)) >> (32 - prefix_bits) << (32 - prefix_bits)
    return socket.inet_ntoa(number.to_bytes(4))
