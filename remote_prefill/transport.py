"""gRPC servers and channels as KV needs them: message sizes, keepalive, TLS, no proxies."""

from __future__ import annotations

import logging

import grpc.aio

from prfaas.dialling import Endpoint
from prfaas.errors import ConfigError
from prfaas.frames import DEFAULT_FRAME_LIMITS, HEADER_BYTES
from prfaas.limits import Limits
from prfaas.settings import TlsSettings
from prfaas.tcp_info import (
    Unavailable,
    bound_unsent,
    find_listeners,
    find_socket,
    read_congestion,
    set_congestion,
)
from prfaas.tls import PeerGate, server_credentials
from prfaas.tls_files import TlsFiles

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = (
    max(DEFAULT_FRAME_LIMITS.max_payload_bytes, DEFAULT_FRAME_LIMITS.max_control_bytes)
    + HEADER_BYTES
)
KEEPALIVE_S = 5.0
"""A dead connection is noticed within twice this, also where no session runs.

gRPC's own limit for the answer to a ping is a minute, whatever its keepalive time-out says.
"""
MAX_METADATA_BYTES = 8 << 10
"""Our own RPCs carry none up, and one typed error down."""
UNSENT_BYTES = 256 << 10
"""What the kernel may hold of a connection beyond what is in flight. What it holds goes out even
when its session has been cancelled, and the next one waits behind it: with the 4 MB of Linux and
four connections that is 15 s at 8 Mbit/s.
"""
MOST_UNSENT_BYTES = 4 << 20
UNSENT_S = 0.1
"""Of a lane whose rate is known the kernel may hold what leaves in this time: with less, a fast
link is idle where the sender comes late, and it comes too often where it is not.
"""
HANDSHAKE_TIMEOUT_S = 10.0
"""A connection that has not said anything sensible by then is closed."""
WATCH_REQUEST_BYTES = 64 << 10
"""The largest message that may come in where only watchers and health checks call."""
_CONTROL_BYTES = 64 << 10
_NEVER_MS = (1 << 31) - 1

SERVICE = "prfaas.rpc.v1.Prefill"
SESSION = f"/{SERVICE}/Session"
DATA = f"/{SERVICE}/Data"

Options = list[tuple[str, int]]


def server_options(receive_bytes: int) -> Options:
    """Of a server whose clients may send messages of so many bytes."""
    return [
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.so_reuseport", 0),
        # Clients ping idle connections on purpose; do not punish them for it.
        ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_S * 1000)),
    ]


def control_bytes(limits: Limits) -> int:
    """The largest message that may come in at P: OPEN with the longest prompt."""
    return 4 * limits.max_prompt_tokens + _CONTROL_BYTES


def channel_options() -> Options:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Every channel is to be a connection of its own.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.client_idle_timeout_ms", _NEVER_MS),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the time one attempt to connect may take: several round trips of a slow link.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def open_channel(endpoint: Endpoint) -> grpc.aio.Channel:
    """A channel for KV and its control; the caller closes it."""
    return endpoint.open(channel_options())


def bind(server: grpc.aio.Server, host: str, port: int, files: TlsFiles | None = None) -> int:
    """Bind, with mutual TLS where there are certificates, and return the port.

    Raises ConfigError where it is taken.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if files is None:
            bound = server.add_insecure_port(where)
        else:
            bound = server.add_secure_port(where, server_credentials(files))
    except RuntimeError as exc:
        text = f"cannot listen on {where}: the address is taken, or not one of this host's"
        raise ConfigError(text) from exc
    if not bound:
        raise ConfigError(f"cannot listen on {where}")
    return int(bound)


def use_congestion(port: int, name: str) -> str:
    """Congestion control of each connection that the server on `port` will accept: the one in use,
    read back; empty where it cannot be known. An empty `name` leaves the system's.
    """
    listeners = find_listeners(port)
    if isinstance(listeners, Unavailable):
        log.info("congestion control is the system's own: %s", listeners.reason)
        return ""
    in_use = ""
    for sock in listeners:
        with sock:
            done = set_congestion(sock, name) if name else read_congestion(sock)
        if isinstance(done, Unavailable):
            log.info("congestion control is the system's own: %s", done.reason)
            continue
        in_use = done.in_use
        if done.reason:
            log.warning("congestion control is %s: %s", in_use, done.reason)
    return in_use


def keep_queues_short(port: int) -> None:
    """Bound what the kernel queues of each connection that the server on `port` will accept."""
    listeners = find_listeners(port)
    if isinstance(listeners, Unavailable):
        log.info("send queues are the kernel's own: %s", listeners.reason)
        return
    for sock in listeners:
        with sock:
            done = bound_unsent(sock, UNSENT_BYTES)
        if isinstance(done, Unavailable):
            log.info("send queues are the kernel's own: %s", done.reason)


def unsent_bytes_at(bytes_per_s: float) -> int:
    """What the kernel may hold of a lane of that rate: a power of two, it seldom changes."""
    wanted = int(bytes_per_s * UNSENT_S)
    return min(MOST_UNSENT_BYTES, max(UNSENT_BYTES, 1 << wanted.bit_length()))


def bound_queue(peer: str, nbytes: int) -> None:
    """Bound what the kernel queues of the connection that this server has accepted from `peer`, as
    gRPC says it; where it cannot be reached it keeps the bound it has.
    """
    sock = find_socket(peer)
    if isinstance(sock, Unavailable):
        log.debug("the queue to %s stays as it is: %s", peer, sock.reason)
        return
    with sock:
        bound_unsent(sock, nbytes)


def gates(tls: TlsSettings | None, max_rpcs: int) -> list[grpc.aio.ServerInterceptor]:
    """What stands before every RPC of a server that takes `max_rpcs` at once.

    One client gets at most three quarters of them, so that it cannot keep all others out.
    """
    return [PeerGate(tls.peers, max_rpcs_each=max_rpcs * 3 // 4)] if tls is not None else []
