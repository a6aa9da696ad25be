"""TCP_INFO and congestion control on real sockets, our own and those inside gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from prfaas import tcp_info
from prfaas.tcp_info import (
    RESCAN_S,
    Congestion,
    ConnectionProbe,
    TcpInfo,
    Unavailable,
    bound_unsent,
    find_listeners,
    find_socket,
    find_sockets,
    parse_peer,
    parse_tcp_info,
    read_tcp_info,
    set_congestion,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
MIB = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=5)
        server, _ = listener.accept()
    with client, server:
        yield client, server


def info_of(sock: socket.socket) -> TcpInfo:
    info = read_tcp_info(sock)
    assert isinstance(info, TcpInfo), info
    return info


def peer_of(sock: socket.socket) -> str:
    host, port = sock.getpeername()
    return f"ipv4:{host}:{port}"


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_counters_are_those_of_the_bytes_that_moved(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    payload = os.urandom(64 * 1024)
    client.sendall(payload)
    received = 0
    while received < len(payload):
        received += len(server.recv(MIB))
    deadline = time.monotonic() + 5
    while (sent := info_of(client)).unacked_packets and time.monotonic() < deadline:
        time.sleep(0.001)  # the last ack is a few microseconds behind
    assert sent.bytes_sent == len(payload)
    assert sent.bytes_acked is not None
    assert len(payload) <= sent.bytes_acked <= len(payload) + 1  # the SYN counts as one
    assert sent.bytes_retrans == sent.total_retrans_packets == sent.lost_packets == 0
    assert sent.notsent_bytes == 0
    assert info_of(server).bytes_received == len(payload)
    assert sent.rtt_s is not None
    assert sent.min_rtt_s is not None
    assert 0 < sent.min_rtt_s <= 5
    assert 0 < sent.rtt_s < 5
    assert sent.mss_bytes is not None
    assert sent.mss_bytes > 500
    assert sent.cwnd_packets is not None
    assert sent.cwnd_packets > 1
    assert sent.delivery_rate_bytes_per_s is not None
    assert sent.delivery_rate_bytes_per_s > 1000


def test_a_receiver_that_does_not_read_shows_as_unsent_and_window_limited(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, _ = pair
    client.setblocking(False)
    try:
        while True:
            client.send(bytes(MIB))
    except BlockingIOError:
        pass
    time.sleep(0.05)
    stuck = info_of(client)
    assert stuck.notsent_bytes is not None
    assert stuck.notsent_bytes > 0
    assert stuck.busy_s is not None
    assert stuck.rwnd_limited_s is not None
    assert 0.02 < stuck.rwnd_limited_s <= stuck.busy_s


def test_an_older_kernel_tells_less_and_nothing_is_made_up() -> None:
    whole = bytearray(os.urandom(232))
    struct.pack_into("=I", whole, 68, 1500)
    struct.pack_into("=I", whole, 148, 1000)
    struct.pack_into("=Q", whole, 208, 77)
    new = parse_tcp_info(bytes(whole) + b"fields of the future")
    assert new.rtt_s == pytest.approx(0.0015)
    assert new.min_rtt_s == pytest.approx(0.001)
    assert new.bytes_retrans == 77
    old = parse_tcp_info(bytes(whole[:104]))
    assert old.rtt_s == new.rtt_s
    assert old.total_retrans_packets == new.total_retrans_packets
    assert (old.min_rtt_s, old.bytes_acked, old.busy_s, old.bytes_retrans) == (None,) * 4
    assert old.delivery_rate_app_limited is None
    empty = parse_tcp_info(b"")
    assert {getattr(empty, name) for name in TcpInfo.__dataclass_fields__} == {None}


def test_the_kernels_own_unknowns_are_none() -> None:
    nothing = parse_tcp_info(bytes(148) + b"\xff" * 4 + bytes(80))
    assert nothing.min_rtt_s is None
    assert nothing.rtt_s is None
    unpaced = parse_tcp_info(bytes(104) + b"\xff" * 8 + bytes(120))
    assert unpaced.pacing_rate_bytes_per_s is None
    assert unpaced.bytes_acked == 0


def test_a_socket_that_is_not_tcp_has_a_reason_instead() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        assert isinstance(read_tcp_info(sock), Unavailable)
        assert isinstance(set_congestion(sock, "reno"), Unavailable)


def test_the_congestion_control_in_use_is_read_back(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, _ = pair
    before = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0]
    refused = set_congestion(client, "nosuch")
    assert refused == Congestion(before.decode(), "the kernel has no nosuch")
    assert set_congestion(client, "reno") == Congestion("reno", "")
    assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"reno")


def test_connections_inherit_the_congestion_control_of_their_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = find_listeners(port)
        assert isinstance(found, list)
        assert len(found) == 1
        with found[0] as same:
            assert set_congestion(same, "reno") == Congestion("reno", "")
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            accepted, _ = listener.accept()
            with accepted:
                kind = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert kind.startswith(b"reno")
                assert not find_listeners(client.getsockname()[1])


def test_connections_inherit_the_bound_on_unsent_bytes_and_keep_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert bound_unsent(listener, 1 << 16) == 1 << 16
        with socket.create_connection(listener.getsockname(), timeout=5) as client:
            accepted, _ = listener.accept()
            with accepted:
                accepted.setblocking(False)
                queued = 0
                with contextlib.suppress(BlockingIOError):
                    while queued < 64 * MIB:
                        queued += accepted.send(bytes(1 << 14))
                unsent = info_of(accepted).notsent_bytes
                assert unsent is not None
                assert unsent <= 2 << 16
                assert queued < 64 * MIB
                assert client.recv(1)


def test_a_connection_is_found_by_its_peer_and_told_apart_by_its_port(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    before = open_fds()
    with client.dup():  # however many descriptors it has, it is one connection
        found = find_socket(peer_of(server))
        assert isinstance(found, socket.socket)
        with found:
            assert found.getsockname() == server.getsockname()
    assert open_fds() == before
    none = find_socket(peer_of(server), local_port=1)
    assert none == Unavailable(f"0 sockets of this process are connected to {peer_of(server)}")
    assert open_fds() == before


def test_reading_a_connection_leaves_its_owner_undisturbed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    client.settimeout(2.0)
    with found_socket(peer_of(client)) as same:
        assert isinstance(read_tcp_info(same), TcpInfo)
    client.sendall(b"still here")
    assert server.recv(100) == b"still here"
    assert client.gettimeout() == 2.0


def test_a_probe_reads_a_connection_again_and_again_and_holds_nothing(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    before = open_fds()
    probe = ConnectionProbe(peer_of(client))
    for total in (1000, 2000, 3000):
        client.sendall(bytes(1000))
        server.recv(1 << 16)
        deadline = time.monotonic() + 5
        while (info := probe.read()) and time.monotonic() < deadline:
            assert isinstance(info, TcpInfo)
            if info.bytes_acked == total + 1:
                break
        assert isinstance(info, TcpInfo)
        assert info.bytes_acked == total + 1
        assert open_fds() == before


def test_a_probe_never_reads_another_connection_that_took_the_descriptor(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, _ = pair
    now = [100.0]
    probe = ConnectionProbe(peer_of(client), lambda: now[0])
    assert isinstance(probe.read(), TcpInfo)
    # The socket that the probe reads is the one connected to `client`'s peer: `client` itself.
    peer = client.getpeername()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5) as other,
    ):
        os.dup2(other.fileno(), client.fileno())
        gone = Unavailable(f"0 sockets of this process are connected to {peer[0]}:{peer[1]}")
        assert probe.read() == gone


def test_a_probe_does_not_go_through_all_descriptors_again_and_again(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[None] = []
    own_sockets = tcp_info._own_sockets

    def counted() -> Iterator[tuple[int, socket.socket]]:
        scans.append(None)
        return own_sockets()

    monkeypatch.setattr(tcp_info, "_own_sockets", counted)
    now = [100.0]
    probe = ConnectionProbe("ipv4:127.0.0.1:1", lambda: now[0])
    for _ in range(10):
        assert isinstance(probe.read(), Unavailable)
    assert len(scans) == 1
    now[0] += RESCAN_S
    assert isinstance(probe.read(), Unavailable)
    assert len(scans) == 2
    found = ConnectionProbe(peer_of(pair[0]))
    for _ in range(10):
        assert isinstance(found.read(), TcpInfo)
    assert len(scans) == 3
    assert isinstance(ConnectionProbe("unix:/x").read(), Unavailable)
    assert len(scans) == 3


def test_ipv6_connections_are_found() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    with listener, socket.create_connection(listener.getsockname()[:2], timeout=5) as client:
        port = listener.getsockname()[1]
        with found_socket(f"ipv6:%5B::1%5D:{port}") as same:
            assert same.getsockname() == client.getsockname()


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:80", ("127.0.0.1", 80)),
        ("ipv6:[::1]:443", ("::1", 443)),
        ("ipv6:%5B::1%5D:443", ("::1", 443)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:443", ("10.0.0.1", 443)),
        ("ipv6:%5Bfe80::1%25eth0%5D:443", ("fe80::1", 443)),
        ("ipv6:[0:0::1]:443", ("::1", 443)),
    ],
)
def test_peers_in_every_form_of_grpc_are_understood(peer: str, address: tuple[str, int]) -> None:
    assert parse_peer(peer) == address


@pytest.mark.parametrize(
    "peer", ["", "unix:", "unix:/tmp/x:1", "ipv4:host:80", "ipv4:1.2.3.4", "ipv4:1.2.3.4:99999"]
)
def test_what_is_no_tcp_peer_has_a_reason_instead(peer: str) -> None:
    assert isinstance(parse_peer(peer), Unavailable)
    assert isinstance(find_sockets(peer), Unavailable)


def test_other_platforms_have_a_reason_instead(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = pair
    monkeypatch.setattr(tcp_info, "_FDS", "/nonexistent")
    assert find_sockets(peer_of(client)) == Unavailable(
        "/nonexistent cannot be read: No such file or directory"
    )
    monkeypatch.setattr(sys, "platform", "darwin")
    for answer in (read_tcp_info(client), set_congestion(client, "bbr")):
        assert isinstance(answer, Unavailable)
        assert "darwin" in answer.reason


@asynccontextmanager
async def grpc_server(peers: list[str]) -> AsyncIterator[int]:
    """Swallows what it is sent and notes who sent it."""

    async def swallow(request: bytes, context: Any) -> bytes:
        peers.append(context.peer())
        return b""

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handlers = {"Swallow": grpc.unary_unary_rpc_method_handler(swallow)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Sink", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def grpc_channel(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
    )


async def swallow(channel: grpc.aio.Channel, payload: bytes) -> None:
    await channel.unary_unary("/Sink/Swallow")(payload, timeout=5)


def found_socket(peer: str) -> socket.socket:
    found = find_socket(peer)
    assert isinstance(found, socket.socket), found
    return found


async def test_the_sockets_of_a_grpc_server_and_channel_are_reached() -> None:
    peers: list[str] = []
    async with grpc_server(peers) as port, grpc_channel(port) as channel:
        await swallow(channel, os.urandom(MIB))
        with found_socket(peers[0]) as at_server, found_socket(f"ipv4:127.0.0.1:{port}") as client:
            assert at_server.getpeername() == client.getsockname()
            received, sent = info_of(at_server), info_of(client)
            for count in (received.bytes_received, sent.bytes_sent):
                assert count is not None
                assert MIB < count < 1.1 * MIB
            assert set_congestion(at_server, "reno") == Congestion("reno", "")
        await swallow(channel, b"and it still works")


async def test_each_of_several_channels_to_one_server_has_its_socket() -> None:
    peers: list[str] = []
    async with (
        grpc_server(peers) as port,
        grpc_channel(port) as first,
        grpc_channel(port) as second,
    ):
        for channel, size in ((first, MIB // 4), (second, MIB // 2)):
            await swallow(channel, bytes(size))
        to_server = f"ipv4:127.0.0.1:{port}"
        found = find_sockets(to_server)
        assert isinstance(found, list)
        sent = []
        for sock in found:
            with sock:
                sent.append(info_of(sock).bytes_sent or 0)
        assert len(sent) == 2
        assert 0.7 * MIB < sum(sent) < 0.9 * MIB
        assert isinstance(find_socket(to_server), Unavailable)
        # The server's view of a connection names the client's port.
        local_port = int(peers[0].rpartition(":")[2])
        one = find_socket(to_server, local_port)
        assert isinstance(one, socket.socket)
        with one:
            assert (info_of(one).bytes_sent or 0) < MIB // 3


async def test_a_channel_that_closes_is_gone_although_it_was_looked_at() -> None:
    peers: list[str] = []
    async with grpc_server(peers) as port:
        async with grpc_channel(port) as channel:
            await swallow(channel, b"x")
            found_socket(f"ipv4:127.0.0.1:{port}").close()
        async with asyncio.timeout(5):
            while gone := find_sockets(f"ipv4:127.0.0.1:{port}"):
                assert isinstance(gone, list)
                for sock in gone:
                    sock.close()
                await asyncio.sleep(0.01)  # gRPC closes its socket a little after the channel
