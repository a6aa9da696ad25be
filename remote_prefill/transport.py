"""gRPC servers and channels as KV needs them: message sizes, keepalive, no proxies, loopback."""

from __future__ import annotations

import ipaddress

import grpc.aio

from prfaas.errors import ConfigError
from prfaas.frames import DEFAULT_FRAME_LIMITS, HEADER_BYTES

MAX_MESSAGE_BYTES = (
    max(DEFAULT_FRAME_LIMITS.max_payload_bytes, DEFAULT_FRAME_LIMITS.max_control_bytes)
    + HEADER_BYTES
)
KEEPALIVE_S = 5.0
"""A dead connection is noticed within twice this, also where no session runs."""
_NEVER_MS = (1 << 31) - 1

SERVICE = "prfaas.rpc.v1.Prefill"
TRANSFER = f"/{SERVICE}/Transfer"

Options = list[tuple[str, int]]


def server_options() -> Options:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
        # Clients ping idle connections on purpose; do not punish them for it.
        ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ]


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
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.client_idle_timeout_ms", _NEVER_MS),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the time one attempt to connect may take: several round trips of a slow link.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `host:port`; the caller closes it."""
    return grpc.aio.insecure_channel(address, options=channel_options())


def require_loopback(host: str, key: str) -> None:
    """Raise ConfigError unless `host` is loopback: without TLS nothing may listen elsewhere."""
    if host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"{key}: {host!r} is not a loopback address; this version has no TLS, so its ports "
            "bind loopback only"
        )


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind and return the port. Raises ConfigError where it is taken."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(where)
    except RuntimeError as exc:
        raise ConfigError(f"cannot listen on {where}: {exc}") from exc
    if not bound:
        raise ConfigError(f"cannot listen on {where}")
    return int(bound)
