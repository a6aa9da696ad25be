"""Without TLS nothing listens beyond loopback, and a taken port is a ConfigError."""

from __future__ import annotations

import socket

import grpc.aio
import pytest

from prfaas.errors import ConfigError
from prfaas.frames import DEFAULT_FRAME_LIMITS
from remote_prefill.transport import (
    bind,
    channel_options,
    require_loopback,
    server_options,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_is_allowed(host: str) -> None:
    require_loopback(host, "prefill.host")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_anything_else_is_refused_and_says_why(host: str) -> None:
    with pytest.raises(ConfigError, match=r"prefill\.host: .* no TLS"):
        require_loopback(host, "prefill.host")


def test_messages_hold_the_largest_frame() -> None:
    for options in (server_options(), channel_options()):
        most = dict(options)["grpc.max_receive_message_length"]
        assert most > DEFAULT_FRAME_LIMITS.max_payload_bytes


async def test_a_port_that_is_taken_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = grpc.aio.server(options=server_options())
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind(server, "127.0.0.1", port)
        assert bind(server, "127.0.0.1", 0) > 0
        await server.stop(None)
