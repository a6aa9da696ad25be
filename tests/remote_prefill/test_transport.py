"""Messages fit what may come, and a taken port is a ConfigError."""

from __future__ import annotations

import socket
import sys

import grpc.aio
import pytest

from prfaas.errors import ConfigError
from prfaas.frames import DEFAULT_FRAME_LIMITS
from prfaas.limits import Limits
from prfaas.tcp_info import Congestion, find_socket, find_sockets, read_congestion
from remote_prefill.transport import (
    MOST_UNSENT_BYTES,
    UNSENT_BYTES,
    WATCH_REQUEST_BYTES,
    bind,
    bound_queue,
    channel_options,
    control_bytes,
    keep_queues_short,
    server_options,
    unsent_bytes_at,
    use_congestion,
)


def test_messages_hold_the_largest_frame() -> None:
    most = dict(channel_options())["grpc.max_receive_message_length"]
    assert most > DEFAULT_FRAME_LIMITS.max_payload_bytes


def test_p_takes_the_longest_prompt_and_hardly_more() -> None:
    limits = Limits(max_prompt_tokens=1000)
    most = dict(server_options(control_bytes(limits)))["grpc.max_receive_message_length"]
    assert 4000 < most < 4000 + (128 << 10)


async def test_a_port_that_is_taken_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = grpc.aio.server(options=server_options(WATCH_REQUEST_BYTES))
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind(server, "127.0.0.1", port)
        assert bind(server, "127.0.0.1", 0) > 0
        await server.stop(None)


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_CONGESTION is Linux's")
async def test_congestion_control_is_set_and_read_back() -> None:
    server = grpc.aio.server(options=server_options(WATCH_REQUEST_BYTES))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    system = use_congestion(port, "")
    assert system
    assert use_congestion(port, "no-such-control") == system
    assert use_congestion(port, "reno") == "reno"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        found = find_sockets(f"ipv4:127.0.0.1:{port}")
        assert isinstance(found, list)
        for ours in found:
            with ours:
                host, mine = ours.getsockname()[:2]
            accepted = find_socket(f"ipv4:{host}:{mine}")
            assert isinstance(accepted, socket.socket)
            with accepted:
                assert read_congestion(accepted) == Congestion("reno", "")
        assert found
    await server.stop(None)


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_NOTSENT_LOWAT is Linux's")
async def test_a_cancelled_sessions_bytes_do_not_queue_in_the_kernel_for_long() -> None:
    server = grpc.aio.server(options=server_options(WATCH_REQUEST_BYTES))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    keep_queues_short(port)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        found = find_sockets(f"ipv4:127.0.0.1:{port}")
        assert isinstance(found, list)
        ours = [(sock.getpeername(), sock.getsockname()) for sock in found]
        for sock in found:
            sock.close()
        for _, mine in ours:
            accepted = find_socket(f"ipv4:{mine[0]}:{mine[1]}")
            assert isinstance(accepted, socket.socket)
            with accepted:
                bound = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
                assert bound == UNSENT_BYTES
                bound_queue(f"ipv4:{mine[0]}:{mine[1]}", 3 * UNSENT_BYTES)
                bound = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
                assert bound == 3 * UNSENT_BYTES
        assert ours
    await server.stop(None)


def test_a_fast_lane_may_queue_what_leaves_within_a_tenth_of_a_second_or_two() -> None:
    for bytes_per_s, expected in ((0, UNSENT_BYTES), (1e6, UNSENT_BYTES), (1e9, MOST_UNSENT_BYTES)):
        assert unsent_bytes_at(bytes_per_s) == expected
    for bytes_per_s in (3e6, 9e6, 30e6):
        assert bytes_per_s / 10 <= unsent_bytes_at(bytes_per_s) <= bytes_per_s / 5


def test_a_connection_that_is_not_ours_keeps_its_queue() -> None:
    bound_queue("ipv4:127.0.0.1:9", 1 << 20)
    bound_queue("unix:", 1 << 20)
