"""The bendable link keeps its rate and delay, and each fault does what it says."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest

from prfaas.testing import link as relay
from prfaas.testing.link import BendableLink, LinkShape, Way
from prfaas.testing.link_process import measure_link


class EchoServer:
    """Owns a loopback server that sends back what it gets; `received` counts."""

    def __init__(self) -> None:
        self.received = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> EchoServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.received += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[EchoServer]:
    async with EchoServer() as server:
        yield server


async def _round_trip(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(-1), 20)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("rate_bits_per_s", [10e6, 200e6])
async def test_achieves_its_rate_and_round_trip(rate_bits_per_s: float) -> None:
    async with BendableLink(LinkShape(rate_bits_per_s, 0.04)) as link:
        port = await link.serve_probe()
        # Other processes on the machine may slow a measurement; none may make it faster.
        found = [await measure_link("127.0.0.1", port, seconds=0.2) for _ in range(3)]
    assert max(m.rate_bits_per_s for m in found) == pytest.approx(rate_bits_per_s, rel=0.1)
    assert 0.0395 < min(m.rtt_s for m in found) < 0.05


async def test_connections_share_the_rate(echo: EchoServer) -> None:
    size = 250_000
    async with BendableLink(LinkShape(20e6, 0.0)) as link:
        port = await link.forward("127.0.0.1", echo.port)
        started = time.perf_counter()
        answers = await asyncio.gather(*(_round_trip(port, bytes(size)) for _ in range(4)))
        took_s = time.perf_counter() - started
    assert [len(answer) for answer in answers] == [size] * 4
    assert 4 * size * 8 / 20e6 * 0.97 < took_s < 4 * size * 8 / 20e6 * 1.5


async def test_a_small_message_does_not_wait_behind_bulk_on_another_connection(
    echo: EchoServer,
) -> None:
    async with BendableLink(LinkShape(20e6, 0.02)) as link:
        port = await link.forward("127.0.0.1", echo.port)
        bulk = asyncio.create_task(_round_trip(port, bytes(1_000_000)))
        await asyncio.sleep(0.1)
        started = time.perf_counter()
        assert await _round_trip(port, b"ping") == b"ping"
        assert time.perf_counter() - started < 0.2
        assert not bulk.done()
        assert len(await bulk) == 1_000_000


async def test_rate_and_delay_change_while_it_runs() -> None:
    async with BendableLink(LinkShape(10e6, 0.0)) as link:
        port = await link.serve_probe()
        before = await measure_link("127.0.0.1", port, seconds=0.2, pings=3)
        link.set_shape(rate_bits_per_s=80e6, rtt_s=0.03)
        after = await measure_link("127.0.0.1", port, seconds=0.2, pings=3)
    assert before.rate_bits_per_s < 12e6
    assert after.rate_bits_per_s > 60e6
    assert before.rtt_s < 0.03 <= after.rtt_s


async def test_a_stall_delays_and_loses_nothing(echo: EchoServer) -> None:
    async with BendableLink(LinkShape()) as link:
        port = await link.forward("127.0.0.1", echo.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        link.stall(True)
        writer.write(b"late")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        link.stall(False)
        assert await asyncio.wait_for(reader.readexactly(4), 5) == b"late"
        writer.transport.abort()


async def test_a_black_hole_loses_everything_and_keeps_connections(echo: EchoServer) -> None:
    async with BendableLink(LinkShape()) as link:
        port = await link.forward("127.0.0.1", echo.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        link.blackhole(True)
        writer.write(b"lost")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        link.blackhole(False)
        writer.write(b"kept")
        assert await asyncio.wait_for(reader.readexactly(4), 5) == b"kept"
        assert echo.received == 4
        assert link.stats.connections == 1
        writer.transport.abort()


@pytest.mark.parametrize("way", [Way.UP, Way.DOWN])
async def test_a_black_hole_may_be_in_one_way_only(echo: EchoServer, way: Way) -> None:
    async with BendableLink(LinkShape()) as link:
        port = await link.forward("127.0.0.1", echo.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        link.blackhole(True, way)
        writer.write(b"gone")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        assert echo.received == (0 if way is Way.UP else 4)
        writer.transport.abort()


async def test_an_idle_connection_is_forgotten_and_nobody_is_told(echo: EchoServer) -> None:
    async with BendableLink(LinkShape()) as link:
        port = await link.forward("127.0.0.1", echo.port)
        link.forget_idle_s = 0.2
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(5):  # not idle
            writer.write(b"a")
            assert await asyncio.wait_for(reader.readexactly(1), 5) == b"a"
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        writer.write(b"b")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        assert (echo.received, link.stats.connections) == (5, 1)
        assert await _round_trip(port, b"new") == b"new"
        writer.transport.abort()
        await asyncio.sleep(0.05)
        assert link.stats.connections == 1  # the far end does not know


async def test_a_cut_comes_after_so_many_bytes_or_hits_the_busiest_alone(echo: EchoServer) -> None:
    async with BendableLink(LinkShape(8e6)) as link:
        port = await link.forward("127.0.0.1", echo.port)
        quiet, quiet_writer = await asyncio.open_connection("127.0.0.1", port)
        busy, busy_writer = await asyncio.open_connection("127.0.0.1", port)
        busy_writer.write(bytes(5000))
        await asyncio.wait_for(busy.readexactly(5000), 5)
        assert link.drop_busiest() == 2
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(busy.read(1), 5)
        link.cut_after(20_000)
        quiet_writer.write(bytes(100_000))
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(quiet.readexactly(100_000), 5)
        assert 5000 + 20_000 <= link.stats.down_bytes < 5000 + 30_000
        for writer in (quiet_writer, busy_writer):
            writer.transport.abort()


async def test_new_connections_can_be_sent_elsewhere(echo: EchoServer) -> None:
    async with BendableLink(LinkShape()) as link, EchoServer() as other:
        port = await link.forward("127.0.0.1", other.port)
        link.retarget(port, "127.0.0.1", echo.port)
        assert await _round_trip(port, b"here") == b"here"
        assert (echo.received, other.received) == (4, 0)


async def test_dropped_connections_are_reset_and_new_ones_work(echo: EchoServer) -> None:
    async with BendableLink(LinkShape()) as link:
        port = await link.forward("127.0.0.1", echo.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"a")
        assert await asyncio.wait_for(reader.readexactly(1), 5) == b"a"
        assert link.drop_connections() == 1
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), 5)
        writer.transport.abort()
        assert await _round_trip(port, b"b") == b"b"


async def test_refused_connections_are_reset(echo: EchoServer) -> None:
    async with BendableLink(LinkShape()) as link:
        port = await link.forward("127.0.0.1", echo.port)
        link.refuse = True
        with pytest.raises(ConnectionError):
            await _round_trip(port, b"a")
        link.refuse = False
        assert await _round_trip(port, b"b") == b"b"


async def test_corruption_flips_one_bit_of_one_large_chunk(echo: EchoServer) -> None:
    sent = bytes(300_000)
    async with BendableLink(LinkShape()) as link:
        port = await link.forward("127.0.0.1", echo.port)
        link.down.corrupt_left = 1
        assert await _round_trip(port, b"small") == b"small"
        got = await _round_trip(port, sent)
        assert sum(bin(byte).count("1") for byte in got) == 1
        assert await _round_trip(port, sent) == sent


async def test_a_reader_that_stops_bounds_what_the_link_takes() -> None:
    taken_up = asyncio.Event()

    async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await taken_up.wait()
        writer.transport.abort()

    server = await asyncio.start_server(never_read, "127.0.0.1", 0, limit=1024)
    async with BendableLink(LinkShape(400e6, 0.01)) as link:
        port = await link.forward("127.0.0.1", server.sockets[0].getsockname()[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(64 << 20))
        carried = -1
        while link.stats.up_bytes != carried:
            carried = link.stats.up_bytes
            await asyncio.sleep(0.3)
        assert 0 < carried < 16 << 20
        taken_up.set()
        writer.transport.abort()
    server.close()
    await server.wait_closed()


async def test_an_unreachable_target_resets_the_connection(unused_tcp_port: int) -> None:
    async with BendableLink(LinkShape()) as link:
        port = await link.forward("127.0.0.1", unused_tcp_port)
        with pytest.raises(ConnectionError):
            await _round_trip(port, b"a")
        assert link.stats.connections == 0


async def test_small_messages_are_not_held_back(
    echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodelay: list[int] = []
    abort = relay._abort

    def looked_at(writer: asyncio.StreamWriter) -> None:
        if not writer.transport.is_closing():
            sock = writer.get_extra_info("socket")
            nodelay.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        abort(writer)

    monkeypatch.setattr(relay, "_abort", looked_at)
    async with BendableLink(LinkShape()) as link:
        port = await link.forward("127.0.0.1", echo.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"one")
        assert await asyncio.wait_for(reader.readexactly(3), 20) == b"one"
        link.drop_connections()
        writer.transport.abort()
    assert nodelay == [1, 1]  # towards who connects, and towards who is connected to
