"""The relay process obeys its owner and ends with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from prfaas.testing.link import LinkShape, Way
from prfaas.testing.link_process import LinkProcess


async def test_measures_accurately_at_each_shape(unused_tcp_port: int) -> None:
    async with LinkProcess("127.0.0.1", unused_tcp_port, LinkShape(10e6, 0.01)) as link:
        for shape in (LinkShape(10e6, 0.01), LinkShape(100e6, 0.04), LinkShape(1e9, 0.08)):
            await link.set_shape(shape)
            # Other processes on the machine may slow a measurement; none may make it faster.
            found = [await link.measure(0.1) for _ in range(3)]
            assert max(m.rate_bits_per_s for m in found) == pytest.approx(
                shape.rate_bits_per_s, rel=0.1
            )
            assert shape.rtt_s - 0.0005 < min(m.rtt_s for m in found) < shape.rtt_s + 0.005


async def test_relays_and_obeys_fault_commands(unused_tcp_port: int) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", unused_tcp_port)
    async with LinkProcess("127.0.0.1", unused_tcp_port, LinkShape()) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"hello")
        assert await asyncio.wait_for(reader.readexactly(5), 5) == b"hello"
        stats = await link.stats()
        assert (stats.up_bytes, stats.down_bytes, stats.connections) == (5, 5, 1)
        await link.stall(True)
        await link.stall(False)
        await link.blackhole(True)
        await link.blackhole(False)
        await link.blackhole(False, Way.UP)
        await link.corrupt_down(0)
        await link.forget_idle(0.0)
        await link.cut_after(1 << 30)
        assert await link.drop_connections() == 1
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reader.read(1), 5)
        writer.transport.abort()
        await link.refuse(True)
        with pytest.raises(ConnectionError):
            await _first_byte(link.port)
        with pytest.raises(RuntimeError, match="unknown command 'bend'"):
            await link._command("bend it")
        with pytest.raises(RuntimeError, match="could not convert"):
            await link._command("rate fast")
    server.close()
    await server.wait_closed()


async def _first_byte(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await asyncio.wait_for(reader.readexactly(1), 5)
    finally:
        writer.transport.abort()


def test_ends_when_its_owner_closes_standard_input() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "prfaas.testing.link", "--control", "--target", "127.0.0.1:9"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert b'"port"' in process.stdout.readline()
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()
