"""A bendable link: a TCP relay with rate, delay and faults that can be changed while it runs.

All connections of one link share its rate in each direction, chunk by chunk in turn. What it cannot
show: slow start, loss and congestion, because both TCP connections end at the relay.

`python -m prfaas.testing.link` runs one as a process (see `prfaas.testing.link_process`), on an
event loop whose timers are not rounded to milliseconds; in another loop each way may be 1 ms late.
"""

from __future__ import annotations

import asyncio
import enum
import json
import math
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import click

from prfaas.testing.fine_selector import FineSelector

_HORIZON_S = 0.003
"""How far ahead of time bytes are put on the line: hides late wake-ups, costs so much queue."""

_LATE_S = 0.05
"""A backlogged sender loses no rate when the relay itself was not scheduled for so long."""

_RECENT_S = 0.25

_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 1448, 65536
_SOCKET_BUFFER_BYTES = 128 << 10
"""Small, so that a sender sees the link's pace and not megabytes of the kernel's buffers."""


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Bits a second in each direction (0: no limit) and the round trip in seconds."""

    rate_bits_per_s: float = 0.0
    rtt_s: float = 0.0

    @property
    def chunk_bytes(self) -> int:
        """About a millisecond of line time."""
        if self.rate_bits_per_s <= 0:
            return _MAX_CHUNK_BYTES
        return int(min(max(self.rate_bits_per_s / 8e3, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES))

    @property
    def queue_bytes(self) -> int:
        """What one connection may have under way in one direction."""
        if self.rate_bits_per_s <= 0:
            return 16 << 20
        line = self.rate_bits_per_s / 8 * (self.rtt_s / 2 + _HORIZON_S)
        return max(int(2 * line), 4 * self.chunk_bytes)


@dataclass(slots=True)
class Direction:
    """One way of a link: the line that all connections share, and its faults."""

    shape: LinkShape
    carried_bytes: int = 0
    blackhole: bool = False
    corrupt_left: int = 0
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _free_at: float = 0.0

    async def send(self, size: int, backlogged: bool) -> float:
        """Take a turn on the line for `size` bytes; the loop time at which they arrive."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            await self.flowing.wait()
            ahead = self._free_at - loop.time()
            if ahead > _HORIZON_S:
                await asyncio.sleep(ahead - _HORIZON_S)
            start = max(loop.time(), self._free_at)
            if backlogged and start - self._free_at < _LATE_S:
                start = self._free_at
            rate = self.shape.rate_bits_per_s
            self._free_at = start + (size * 8 / rate if rate > 0 else 0.0)
            self.carried_bytes += size
            return self._free_at + self.shape.rtt_s / 2

    def bend(self, data: bytes) -> bytes:
        """Flip one bit in the middle of a large chunk, where one is asked for."""
        if self.corrupt_left and len(data) >= _MIN_CHUNK_BYTES:
            self.corrupt_left -= 1
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data


class _Flight:
    """Bytes of one connection on their way in one direction, bounded; owned by its two tasks."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()

    async def put(self, due: float, data: bytes) -> None:
        while self._bytes > self._direction.shape.queue_bytes:
            await self._wait()
        self._chunks.append((due, data))
        self._bytes += len(data)
        self._changed.set()

    async def get(self) -> bytes:
        """The next chunk, when it is due; empty at the end of the stream."""
        while not self._chunks:
            await self._wait()
        due, data = self._chunks[0]
        delay = due - asyncio.get_running_loop().time()
        if delay > 0:
            await asyncio.sleep(delay)
        await self._direction.flowing.wait()
        self._chunks.popleft()
        self._bytes -= len(data)
        self._changed.set()
        return data

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


@dataclass(slots=True)
class _Relayed:
    """One connection: how to reset it, and what a middle box knows of it."""

    abort: Callable[[], None]
    active_s: float
    """Loop time at which bytes last came by."""
    recent_bytes: float = 0.0
    """Carried of late, as of `active_s`."""
    forgotten: bool = False
    """The middle box has dropped it and tells nobody: all that still comes is lost."""
    ended_ways: int = 0

    def recent(self, now: float) -> float:
        return self.recent_bytes * math.pow(0.5, (now - self.active_s) / _RECENT_S)


class Way(enum.StrEnum):
    """Which way of a link a fault is in. `up`: from who connects."""

    UP = "up"
    DOWN = "down"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Payload bytes put on the line (up: from who connects), and connections open now."""

    up_bytes: int
    down_bytes: int
    connections: int


class BendableLink:
    """Owns its listening ports and relayed connections; close with `aclose` or `async with`."""

    def __init__(self, shape: LinkShape) -> None:
        self.up = Direction(shape)
        self.down = Direction(shape)
        self.up.flowing.set()
        self.down.flowing.set()
        self.refuse = False
        self.forget_idle_s = 0.0
        """Connections idle for longer are forgotten, as by a NAT; 0: never."""
        self._cut_at_bytes = 0
        self._servers: list[asyncio.Server] = []
        self._targets: dict[int, tuple[str, int]] = {}
        self._connections: dict[asyncio.Task[None], _Relayed] = {}

    async def __aenter__(self) -> BendableLink:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def shape(self) -> LinkShape:
        return self.up.shape

    @property
    def stats(self) -> LinkStats:
        return LinkStats(self.up.carried_bytes, self.down.carried_bytes, len(self._connections))

    async def forward(self, host: str, port: int, *, listen_port: int = 0) -> int:
        """Relay connections to a loopback port (0 picks one, which is returned) to `host:port`."""

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(reader, writer, *self._targets[listening])

        listening = await self._listen(accepted, listen_port)
        self._targets[listening] = host, port
        return listening

    def retarget(self, listening: int, host: str, port: int) -> None:
        """New connections to this port go elsewhere."""
        self._targets[listening] = host, port

    async def serve_probe(self) -> int:
        """A port through this link whose far end answers `measure_link`."""
        server = await asyncio.start_server(_answer_probe, "127.0.0.1", 0)
        self._servers.append(server)
        return await self.forward("127.0.0.1", server.sockets[0].getsockname()[1])

    def set_shape(
        self, *, rate_bits_per_s: float | None = None, rtt_s: float | None = None
    ) -> None:
        """Change rate or round trip; bytes already on the line keep their time."""
        for direction in (self.up, self.down):
            shape = direction.shape
            if rate_bits_per_s is not None:
                shape = replace(shape, rate_bits_per_s=rate_bits_per_s)
            if rtt_s is not None:
                shape = replace(shape, rtt_s=rtt_s)
            direction.shape = shape

    def stall(self, stalled: bool) -> None:
        """Nothing moves in either direction, nothing is lost."""
        for direction in (self.up, self.down):
            if stalled:
                direction.flowing.clear()
            else:
                direction.flowing.set()

    def blackhole(self, active: bool, way: Way = Way.BOTH) -> None:
        """Everything sent this way is lost, and connections stay open."""
        if way is not Way.DOWN:
            self.up.blackhole = active
        if way is not Way.UP:
            self.down.blackhole = active

    def drop_connections(self) -> int:
        """Reset all connections; how many there were."""
        dropped = list(self._connections.values())
        for connection in dropped:
            connection.abort()
        return len(dropped)

    def drop_busiest(self) -> int:
        """Reset the one connection that has carried most of late; how many there were."""
        now = asyncio.get_running_loop().time()
        open_now = list(self._connections.values())
        if open_now:
            max(open_now, key=lambda connection: connection.recent(now)).abort()
        return len(open_now)

    def cut_after(self, nbytes: int) -> None:
        """Reset all connections once so many more bytes have come down; 0: not after all."""
        self._cut_at_bytes = self.down.carried_bytes + nbytes if nbytes else 0

    async def aclose(self) -> None:
        """Stop listening, then reset what is open."""
        for server in self._servers:
            server.close()
        self.drop_connections()
        while self._connections:
            await asyncio.wait(list(self._connections))
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    async def _listen(
        self,
        accepted: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        port: int,
    ) -> int:
        sock = _tcp_socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        server = await asyncio.start_server(accepted, sock=sock, limit=_MAX_CHUNK_BYTES)
        self._servers.append(server)
        return int(sock.getsockname()[1])

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        """One connection from accept to end, as the task that the server made for it."""
        if self.refuse:
            _abort(writer)
            return
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        writers = [writer]

        def abort() -> None:
            for open_writer in writers:
                _abort(open_writer)
            task.cancel()

        connection = self._connections[task] = _Relayed(abort, loop.time())
        try:
            # What connect() would have cost on a real path; here it ended at the relay.
            await asyncio.sleep(self.shape.rtt_s)
            far_reader, far_writer = await _connect(host, port)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                for source, sink, way in (
                    (reader, far_writer, self.up),
                    (far_reader, writer, self.down),
                ):
                    flight = _Flight(way)
                    group.create_task(self._take(source, flight, way, connection))
                    group.create_task(_deliver(flight, sink))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            for open_writer in writers:
                _abort(open_writer)
            del self._connections[task]

    async def _take(
        self,
        reader: asyncio.StreamReader,
        flight: _Flight,
        way: Direction,
        connection: _Relayed,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            data = await reader.read(way.shape.chunk_bytes)
            now = loop.time()
            due = await way.send(len(data), now - before < 1e-4)
            if self.forget_idle_s and now - connection.active_s > self.forget_idle_s:
                connection.forgotten = True
            connection.recent_bytes = connection.recent(now) + len(data)
            connection.active_s = now
            if connection.forgotten:
                _forget(data, connection)
            elif not data or not way.blackhole:
                await flight.put(due, way.bend(data))
            if way is self.down and 0 < self._cut_at_bytes <= way.carried_bytes:
                self._cut_at_bytes = 0
                self.drop_connections()
            if not data:
                return


def _forget(data: bytes, connection: _Relayed) -> None:
    """Nobody hears of the end of a forgotten connection; it is over once both ends have left."""
    if not data:
        connection.ended_ways += 1
        if connection.ended_ways == 2:
            connection.abort()


def _tcp_socket() -> socket.socket:
    """Its protocol is named: of one without, asyncio does not know that it is TCP, and leaves
    Nagle's algorithm on, which holds small messages back for 40 ms."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    return sock


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = _tcp_socket()
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        return await asyncio.open_connection(sock=sock, limit=_MAX_CHUNK_BYTES)
    except BaseException:
        sock.close()
        raise


async def _deliver(flight: _Flight, writer: asyncio.StreamWriter) -> None:
    while data := await flight.get():
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, so that no kernel buffer delivers what the link no longer carries."""
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _answer_probe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """`p`: send the byte back. `d`: send zeros until the other side has enough."""
    zeros = bytes(_MAX_CHUNK_BYTES)
    try:
        while command := await reader.read(1):
            if command == b"p":
                writer.write(command)
                await writer.drain()
                continue
            while True:
                writer.write(zeros)
                await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()


async def _forward(link: BendableLink, line: str) -> dict[str, object] | None:
    """`forward HOST:PORT LISTEN`: one more port on the same line; None for another command."""
    name, *words = line.split()
    if name != "forward":
        return None
    host, _, port = words[0].rpartition(":")
    return {"ok": True, "port": await link.forward(host, int(port), listen_port=int(words[1]))}


def _command(link: BendableLink, line: str) -> dict[str, object]:
    """Carry out one control line and answer it."""
    name, *words = line.split()
    on = words == ["on"]
    if name == "rate":
        link.set_shape(rate_bits_per_s=float(words[0]))
    elif name == "rtt_ms":
        link.set_shape(rtt_s=float(words[0]) / 1e3)
    elif name == "stall":
        link.stall(on)
    elif name == "blackhole":
        link.blackhole(words[1:] == ["on"], Way(words[0]))
    elif name == "forget_idle":
        link.forget_idle_s = float(words[0])
    elif name == "cut_after":
        link.cut_after(int(words[0]))
    elif name == "refuse":
        link.refuse = on
    elif name == "corrupt":
        (link.up if words[0] == "up" else link.down).corrupt_left += int(words[1])
    elif name == "drop":
        return {"ok": True, "dropped": link.drop_connections()}
    elif name == "drop_busiest":
        link.drop_busiest()
    elif name != "stats":
        return {"ok": False, "error": f"unknown command {name!r}"}
    stats = link.stats
    return {
        "ok": True,
        "up_bytes": stats.up_bytes,
        "down_bytes": stats.down_bytes,
        "connections": stats.connections,
    }


async def _run(listen: int, target: tuple[str, int], shape: LinkShape, control: bool) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with BendableLink(shape) as link:
        port = await link.forward(*target, listen_port=listen)
        print(json.dumps({"port": port, "probe_port": await link.serve_probe()}), flush=True)
        controller = asyncio.create_task(_control(link, stop)) if control else None
        await stop.wait()
        if controller is not None:
            controller.cancel()


async def _control(link: BendableLink, stop: asyncio.Event) -> None:
    """Obey standard input; its end is the end of the link, so no relay outlives its owner."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    try:
        while line := (await reader.readline()).decode():
            try:
                answer = await _forward(link, line) or _command(link, line)
            except (ValueError, IndexError, OSError) as exc:
                answer = {"ok": False, "error": f"{line.strip()!r}: {exc}"}
            print(json.dumps(answer), flush=True)
    finally:
        stop.set()


@click.command()
@click.option("--listen", default=0, help="Loopback port; 0 picks one.")
@click.option("--target", required=True, help="HOST:PORT to relay to.")
@click.option("--rate-bits", default=0.0, help="Bits a second each way; 0: no limit.")
@click.option("--rtt-ms", default=0.0, help="Round trip in milliseconds.")
@click.option("--control", is_flag=True, help="Obey lines on standard input until it ends.")
def main(listen: int, target: str, rate_bits: float, rtt_ms: float, control: bool) -> None:
    """Relay TCP with a rate and a delay; the first line printed is JSON with the ports."""
    host, _, port = target.rpartition(":")
    shape = LinkShape(rate_bits, rtt_ms / 1e3)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FineSelector())) as runner:
        runner.run(_run(listen, (host, int(port)), shape, control))


if __name__ == "__main__":
    main()
