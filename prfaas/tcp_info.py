"""What the kernel knows about a TCP connection, also of one that gRPC opened (Linux only)."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

_FDS = "/proc/self/fd"
_MAX_INFO_BYTES = 1024
_MAX_NAME_BYTES = 16  # TCP_CA_NAME_MAX
_US = 1e-6
_INFO = struct.Struct("=7xB8xI4xI4xI32xII4xI16xIQ8xQQ8xII8xQQQQI4xQQ")
"""The fields of struct tcp_info that are read, at their places."""
_UNKNOWN = _INFO.unpack(b"\xff" * _INFO.size)[1:]
RESCAN_S = 5.0

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why something cannot be had on this platform or of this socket."""

    reason: str


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """One connection as this end of it sees it; None is what this kernel does not tell.

    Counters run from the start of the connection. `rtt_s` is smoothed, `min_rtt_s` the least of
    the last minutes: what lies between is queueing. `busy_s` is the time with something to send;
    in `rwnd_limited_s` of it the receiver's window was shut, in `sndbuf_limited_s` this end's send
    buffer was too small.
    """

    rtt_s: float | None
    rtt_var_s: float | None
    min_rtt_s: float | None
    mss_bytes: int | None
    cwnd_packets: int | None
    unacked_packets: int | None
    lost_packets: int | None
    total_retrans_packets: int | None
    delivered_packets: int | None
    bytes_sent: int | None
    bytes_acked: int | None
    bytes_received: int | None
    bytes_retrans: int | None
    notsent_bytes: int | None
    pacing_rate_bytes_per_s: int | None
    delivery_rate_bytes_per_s: int | None
    delivery_rate_app_limited: bool | None
    busy_s: float | None
    rwnd_limited_s: float | None
    sndbuf_limited_s: float | None


@dataclass(frozen=True, slots=True)
class Congestion:
    """The algorithm a socket really uses; `reason` says why it is not the one asked for."""

    in_use: str
    reason: str


def read_tcp_info(sock: socket.socket) -> TcpInfo | Unavailable:
    """TCP_INFO of a connected socket."""
    if sys.platform != "linux":
        return Unavailable(f"TCP_INFO is read on Linux only, not on {sys.platform}")
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MAX_INFO_BYTES)
    except OSError as exc:
        return Unavailable(f"TCP_INFO: {exc.strerror}")
    return parse_tcp_info(data)


def parse_tcp_info(data: bytes) -> TcpInfo:
    """struct tcp_info of linux/tcp.h, which only grows at its end: old kernels give less of it."""
    # What a kernel does not give reads like what it does not know.
    whole = data[: len(data) & ~7].ljust(_INFO.size, b"\xff")
    flags, *values = _INFO.unpack_from(whole)
    told = [None if a == b else a for a, b in zip(values, _UNKNOWN, strict=True)]
    (mss, unacked, lost, rtt, rtt_var, cwnd, retrans, pacing, acked, received, notsent) = told[:11]
    (min_rtt, rate, busy, rwnd_limited, sndbuf_limited, delivered, sent, resent) = told[11:]
    return TcpInfo(
        rtt_s=_seconds(rtt or None),
        rtt_var_s=_seconds(rtt_var),
        min_rtt_s=_seconds(min_rtt),
        mss_bytes=mss,
        cwnd_packets=cwnd,
        unacked_packets=unacked,
        lost_packets=lost,
        total_retrans_packets=retrans,
        delivered_packets=delivered,
        bytes_sent=sent,
        bytes_acked=acked,
        bytes_received=received,
        bytes_retrans=resent,
        notsent_bytes=notsent,
        pacing_rate_bytes_per_s=pacing,
        delivery_rate_bytes_per_s=rate,
        # Kernels that know the flag give more than 160 bytes; before, the bit was padding.
        delivery_rate_app_limited=bool(flags & 1) if len(data) >= 168 else None,
        busy_s=_seconds(busy),
        rwnd_limited_s=_seconds(rwnd_limited),
        sndbuf_limited_s=_seconds(sndbuf_limited),
    )


def set_congestion(sock: socket.socket, name: str) -> Congestion | Unavailable:
    """Ask for a congestion control and read back which one is in use.

    On a listening socket it holds for the connections it accepts from then on.
    """
    if sys.platform != "linux":
        return Unavailable(f"congestion control is set on Linux only, not on {sys.platform}")
    reason = ""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as exc:
        if exc.errno == errno.ENOENT:
            reason = f"the kernel has no {name}"
        elif exc.errno == errno.EPERM:
            reason = f"{name} is not in net.ipv4.tcp_allowed_congestion_control"
        else:
            reason = f"{name}: {exc.strerror}"
    found = read_congestion(sock)
    if isinstance(found, Unavailable) or found.in_use == name:
        return found
    return Congestion(found.in_use, reason)


def read_congestion(sock: socket.socket) -> Congestion | Unavailable:
    """The congestion control in use."""
    if sys.platform != "linux":
        return Unavailable(f"congestion control is read on Linux only, not on {sys.platform}")
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _MAX_NAME_BYTES)
    except OSError as exc:
        return Unavailable(f"TCP_CONGESTION: {exc.strerror}")
    return Congestion(raw.split(b"\0", 1)[0].decode("ascii", "replace"), "")


def bound_unsent(sock: socket.socket, nbytes: int) -> int | Unavailable:
    """Let the kernel hold about `nbytes` that it has not sent yet; what it says it holds then.

    On a listening socket it is so for the connections it accepts from then on.
    """
    if sys.platform != "linux":
        return Unavailable(f"TCP_NOTSENT_LOWAT is set on Linux only, not on {sys.platform}")
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes)
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
    except OSError as exc:
        return Unavailable(f"TCP_NOTSENT_LOWAT: {exc.strerror}")


def find_socket(peer: str, local_port: int | None = None) -> socket.socket | Unavailable:
    """The one connection of this process that `find_sockets` finds; the caller closes it."""
    found = find_sockets(peer, local_port)
    if isinstance(found, Unavailable):
        return found
    if len(found) == 1:
        return found[0]
    for sock in found:
        sock.close()
    return Unavailable(f"{len(found)} sockets of this process are connected to {peer}")


def find_sockets(peer: str, local_port: int | None = None) -> list[socket.socket] | Unavailable:
    """Connections of this process to `peer`, duplicated; the caller closes each, and soon.

    `peer` is in gRPC's form (`ipv4:10.0.0.1:443`, `ipv6:%5B::1%5D:443`): at a server what
    `context.peer()` says, which is one connection; at a client the server's address, to which each
    channel has one. A duplicate shares the connection with its owner: read it and set options, but
    never its blocking mode, and never send, receive or shut down. While it is open so is the
    connection, even if gRPC has closed its own.
    """
    wanted = parse_peer(peer)
    if isinstance(wanted, Unavailable):
        return wanted
    return _matching(lambda sock: _connected(sock, wanted, local_port))


class ConnectionProbe:
    """Reads TCP_INFO of the connection of this process to `peer`, again and again.

    It keeps no descriptor of its own between two readings, so that nothing holds the connection
    open; it remembers the owner's. A connection that is not found is looked for again only after
    RESCAN_S, because that means to go through all descriptors.
    """

    def __init__(self, peer: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._peer = parse_peer(peer)
        self._now_s = now_s
        self._fd: int | None = None
        self._inode = 0
        self._missing: Unavailable | None = None
        self._scanned_s = 0.0

    def read(self) -> TcpInfo | Unavailable:
        peer = self._peer
        if isinstance(peer, Unavailable):
            return peer
        info = self._read_known()
        if info is not None:
            return info
        if self._missing is None or self._now_s() - self._scanned_s >= RESCAN_S:
            self._scanned_s = self._now_s()
            self._missing = self._scan(peer)
        return self._missing or self._read_known() or Unavailable("it has just closed")

    def _read_known(self) -> TcpInfo | Unavailable | None:
        """None: the descriptor is another connection's by now, or none."""
        sock = None if self._fd is None else _duplicate(self._fd)
        if sock is not None:
            with sock, contextlib.suppress(OSError):
                if os.fstat(sock.fileno()).st_ino == self._inode:
                    sock.getpeername()  # raises once it is not connected any more
                    return read_tcp_info(sock)
        self._fd = None
        return None

    def _scan(self, peer: Address) -> Unavailable | None:
        found: list[tuple[int, int]] = []
        try:
            for number, sock in _own_sockets():
                with sock:
                    if _connected(sock, peer, None):
                        found.append((number, os.fstat(sock.fileno()).st_ino))
        except OSError as exc:
            return Unavailable(f"{_FDS} cannot be read: {exc.strerror}")
        if len(found) != 1:
            where = f"{peer[0]}:{peer[1]}"
            return Unavailable(f"{len(found)} sockets of this process are connected to {where}")
        self._fd, self._inode = found[0]
        return None


def find_listeners(port: int) -> list[socket.socket] | Unavailable:
    """Listening TCP sockets of this process on a port, duplicated; the caller closes each."""
    return _matching(lambda sock: _listens(sock, port))


def parse_peer(peer: str) -> Address | Unavailable:
    """(address, port) of a gRPC peer string; an IPv4 address inside an IPv6 one is taken out."""
    scheme, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    try:
        if scheme not in ("ipv4", "ipv6") or not 0 <= int(port) <= 65535:
            raise ValueError
        return _canonical(host.removeprefix("[").removesuffix("]")), int(port)
    except ValueError:
        return Unavailable(f"{peer!r} is not the address of a TCP connection")


def _seconds(value_us: int | None) -> float | None:
    return None if value_us is None else value_us * _US


def _matching(matches: Callable[[socket.socket], bool]) -> list[socket.socket] | Unavailable:
    found = []
    try:
        for _, sock in _own_sockets():
            if matches(sock):
                found.append(sock)
            else:
                sock.close()
    except OSError as exc:
        for sock in found:
            sock.close()
        return Unavailable(f"{_FDS} cannot be read: {exc.strerror}")
    return found


def _own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """All TCP sockets of this process, each once however many descriptors it has: one of them, and
    a duplicate.
    """
    seen = set()
    for name in os.listdir(_FDS):
        try:
            inode = os.readlink(f"{_FDS}/{name}")
        except OSError:  # closed by its owner in the meantime
            continue
        if not inode.startswith("socket:") or inode in seen:
            continue
        seen.add(inode)
        sock = _duplicate(int(name))
        if sock is not None and _is_tcp(sock):
            yield int(name), sock
        elif sock is not None:
            sock.close()


def _duplicate(fd: int) -> socket.socket | None:
    """None: no socket, or closed by its owner in the meantime."""
    same = -1
    try:
        same = os.dup(fd)
        return socket.socket(fileno=same)
    except OSError:
        if same >= 0:
            os.close(same)
        return None


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def _connected(sock: socket.socket, peer: Address, local_port: int | None) -> bool:
    try:
        host, port = sock.getpeername()[:2]
        return (_canonical(host), port) == peer and (
            local_port is None or sock.getsockname()[1] == local_port
        )
    except OSError:
        return False


def _listens(sock: socket.socket, port: int) -> bool:
    try:
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listening) and sock.getsockname()[1] == port
    except OSError:
        return False


def _canonical(host: str) -> str:
    address = ipaddress.ip_address(host.split("%", 1)[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
