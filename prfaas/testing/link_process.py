"""A bendable link as a process of its own, and what a link really achieves."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass

from prfaas.testing.link import LinkShape, LinkStats, Way

_REPLY_TIMEOUT_S = 10.0


class LinkProcess:
    """Owns the relay process between a loopback port and `target_host:target_port`.

    Open and close with `async with`. Every command raises RuntimeError when the relay refuses it.
    """

    def __init__(
        self, target_host: str, target_port: int, shape: LinkShape, *, listen_port: int = 0
    ) -> None:
        self._target = f"{target_host}:{target_port}"
        self._listen_port = listen_port
        self._shape = shape
        self._process: asyncio.subprocess.Process | None = None
        self.port = 0
        self.probe_port = 0

    async def __aenter__(self) -> LinkProcess:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "prfaas.testing.link", "--control", "--target", self._target),
            *("--listen", str(self._listen_port)),
            *("--rate-bits", str(self._shape.rate_bits_per_s)),
            *("--rtt-ms", str(self._shape.rtt_s * 1e3)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            ports = await self._reply()
        except BaseException:
            await self.__aexit__()
            raise
        self.port, self.probe_port = int(str(ports["port"])), int(str(ports["probe_port"]))
        return self

    async def __aexit__(self, *exc: object) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _REPLY_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    @property
    def shape(self) -> LinkShape:
        return self._shape

    async def forward(self, host: str, port: int, *, listen_port: int = 0) -> int:
        """Relay one more loopback port over the same line; which one it is."""
        return int(str((await self._command(f"forward {host}:{port} {listen_port}"))["port"]))

    async def set_shape(self, shape: LinkShape) -> None:
        """Change rate and round trip; bytes already on the line keep their time."""
        await self._command(f"rate {shape.rate_bits_per_s}")
        await self._command(f"rtt_ms {shape.rtt_s * 1e3}")
        self._shape = shape

    async def stall(self, stalled: bool) -> None:
        """Nothing moves in either direction, nothing is lost."""
        await self._command(f"stall {_on(stalled)}")

    async def blackhole(self, active: bool, way: Way = Way.BOTH) -> None:
        """Everything sent this way is lost, and connections stay open."""
        await self._command(f"blackhole {way} {_on(active)}")

    async def forget_idle(self, idle_s: float) -> None:
        """From now on forget connections that are idle for longer, as a NAT does; 0: never."""
        await self._command(f"forget_idle {idle_s}")

    async def refuse(self, active: bool) -> None:
        """New connections are reset at once."""
        await self._command(f"refuse {_on(active)}")

    async def corrupt_down(self, chunks: int) -> None:
        """Flip one bit in each of the next large chunks that go to who connected."""
        await self._command(f"corrupt down {chunks}")

    async def drop_connections(self) -> int:
        """Reset all connections; how many there were."""
        return int(str((await self._command("drop"))["dropped"]))

    async def drop_busiest(self) -> None:
        """Reset the one connection that has carried most of late."""
        await self._command("drop_busiest")

    async def cut_after(self, nbytes: int) -> None:
        """Reset all connections once so many more bytes have come down; 0: not after all."""
        await self._command(f"cut_after {nbytes}")

    async def stats(self) -> LinkStats:
        answer = await self._command("stats")
        return LinkStats(
            int(str(answer["up_bytes"])),
            int(str(answer["down_bytes"])),
            int(str(answer["connections"])),
        )

    async def measure(self, seconds: float = 0.5) -> LinkMeasurement:
        """What the link achieves now (other traffic on it counts against it)."""
        return await measure_link("127.0.0.1", self.probe_port, seconds=seconds)

    async def _command(self, line: str) -> dict[str, object]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()
        answer = await self._reply()
        if not answer["ok"]:
            raise RuntimeError(f"link: {answer['error']}")
        return answer

    async def _reply(self) -> dict[str, object]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), _REPLY_TIMEOUT_S)
        if not line:
            raise RuntimeError("link: the relay process ended")
        answer: dict[str, object] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """Payload bits a second towards who connects, and the median round trip of single bytes."""

    rate_bits_per_s: float
    rtt_s: float


async def measure_link(
    host: str, port: int, *, seconds: float = 0.5, pings: int = 7
) -> LinkMeasurement:
    """Measure through a link's probe port: round trips first, then a stream for `seconds`."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(30.0 + seconds):
            trips = []
            for _ in range(pings + 1):
                started = time.perf_counter()
                writer.write(b"p")
                await reader.readexactly(1)
                trips.append(time.perf_counter() - started)
            writer.write(b"d")
            await reader.read(1 << 16)
            first = last = time.perf_counter()
            received = 0
            while last - first < seconds:
                data = await reader.read(1 << 16)
                last = time.perf_counter()
                received += len(data)
    finally:
        writer.transport.abort()
    # The first trip pays for opening the connection.
    return LinkMeasurement(received * 8 / (last - first), statistics.median(trips[1:]))


def _on(active: bool) -> str:
    return "on" if active else "off"
