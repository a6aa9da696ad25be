"""What a link really gives to TCP: goodput, idle round trip, and what emulating it costs."""

from __future__ import annotations

import bisect
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from bench.wanlink.shape import Side

if TYPE_CHECKING:
    from bench.wanlink.link import WanLink

REPOSITORY = Path(__file__).resolve().parents[2]

_ANSWER_S = 15.0
_PINGS = 20
_WARMUP_ROUND_TRIPS, _MIN_WARMUP_S = 40, 1.0
"""Slow start, its losses and their repair: data held back by a hole would count too late."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One bulk transfer: received bytes over the monotonic clock, and the sender's TCP."""

    samples: tuple[tuple[float, int], ...]
    congestion_control: str
    retransmits: int

    def received_bytes(self, at: float) -> float:
        """Payload bytes received until then, interpolated."""
        index = bisect.bisect_right(self.samples, (at, sys.maxsize))
        if index in (0, len(self.samples)):
            return self.samples[min(index, len(self.samples) - 1)][1]
        (t0, n0), (t1, n1) = self.samples[index - 1 : index + 1]
        return n0 + (n1 - n0) * (at - t0) / (t1 - t0)

    def goodput_bits(self, begin: float, end: float) -> float:
        """Payload bits a second received between two times of the monotonic clock."""
        return (self.received_bytes(end) - self.received_bytes(begin)) * 8 / (end - begin)


class Transfer:
    """Bulk TCP between the sides of a link until `finish`; owns its two processes."""

    def __init__(self, link: WanLink, sender: Side, connections: int) -> None:
        receiver: Side = "b" if sender == "a" else "a"
        address = link.address(receiver)
        self._sink, port = start_sink(link, receiver)
        self._source = _run(link, sender, "source", address, str(port), str(connections))

    def finish(self) -> TransferReport:
        """Stop both ends; TimeoutExpired if one does not answer."""
        tcp = json.loads(self._source.communicate(timeout=_ANSWER_S)[0])
        samples = json.loads(self._sink.communicate(timeout=_ANSWER_S)[0])
        return TransferReport(
            samples=tuple((at, total) for at, total in samples),
            congestion_control="+".join(tcp["congestion_control"]),
            retransmits=tcp["retransmits"],
        )

    def close(self) -> None:
        """Kill what still runs."""
        for process in (self._source, self._sink):
            if process.poll() is None:
                process.kill()
            process.wait()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What so many connections reached together, warm-up left out.

    share_of_rate is goodput over nominal: headers leave 94.1% for TCP at an MTU of 1500.
    line_share is what the line carried, headers and retransmits too: where it is below 1, TCP, the
    machine or the emulator left the line idle.
    """

    connections: int
    goodput_bits: float
    share_of_rate: float
    line_share: float
    congestion_control: str
    retransmits: int
    emulator_cpu_s_per_gb: float
    emulator_cpu_share: float
    worst_late_ms: float
    device_drops: int


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Idle round trip of a small TCP message, and goodput by arrangement."""

    rtt_min_ms: float
    rtt_median_ms: float
    arrangements: tuple[Arrangement, ...]
    scheduling: str

    def __str__(self) -> str:
        lines = [
            f"idle RTT {self.rtt_min_ms:.2f} ms min, {self.rtt_median_ms:.2f} ms median "
            f"(emulator {self.scheduling})"
        ]
        lines += [
            f"{one.connections} connection(s): {one.goodput_bits / 1e6:.1f} Mbit/s goodput, "
            f"{one.share_of_rate:.1%} of nominal (line {one.line_share:.1%} busy), "
            f"{one.congestion_control}, "
            f"{one.retransmits} retransmits; emulator {one.emulator_cpu_s_per_gb:.2f} CPU s/GB "
            f"({one.emulator_cpu_share:.0%} of a core), at worst {one.worst_late_ms:.1f} ms late, "
            f"{one.device_drops} frames lost before it"
            for one in self.arrangements
        ]
        return "\n".join(lines)


def measure(link: WanLink, seconds: float, connections: tuple[int, ...]) -> LinkReport:
    """Ping over the idle link, then fill it a -> b with each number of connections in turn."""
    rtts_s = ping(link, _PINGS)
    warmup_s = max(_MIN_WARMUP_S, _WARMUP_ROUND_TRIPS * min(rtts_s))
    arrangements = tuple(_arrange(link, count, warmup_s, seconds) for count in connections)
    return LinkReport(
        rtt_min_ms=min(rtts_s) * 1e3,
        rtt_median_ms=statistics.median(rtts_s) * 1e3,
        arrangements=arrangements,
        scheduling=link.stats().scheduling,
    )


def ping(link: WanLink, count: int) -> list[float]:
    """Seconds of `count` round trips of one byte over one TCP connection from a to b."""
    sink, port = start_sink(link, "b")
    pinger = _run(link, "a", "ping", link.address("b"), str(port), str(count))
    rtts_s: list[float] = json.loads(pinger.communicate(timeout=_ANSWER_S + count)[0])
    sink.communicate(timeout=_ANSWER_S)
    return rtts_s


def start_sink(link: WanLink, side: Side) -> tuple[subprocess.Popen[bytes], int]:
    """A receiver on that side and its port; it runs until its standard input is closed."""
    process = _run(link, side, "sink", link.address(side))
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise OSError("the sink ended before it listened")
    return process, int(line)


def _arrange(link: WanLink, connections: int, warmup_s: float, seconds: float) -> Arrangement:
    with link.transfer("a", connections) as transfer:
        time.sleep(warmup_s)
        before, begin = link.stats(), time.monotonic()
        time.sleep(seconds)
        after, end = link.stats(), time.monotonic()
        report = transfer.finish()
    goodput_bits = report.goodput_bits(begin, end)
    line_bits = (after.ab.wire_bytes - before.ab.wire_bytes) * 8 / (end - begin)
    cpu_s = after.cpu_s - before.cpu_s
    return Arrangement(
        connections=connections,
        goodput_bits=goodput_bits,
        share_of_rate=goodput_bits / link.rate_bits,
        line_share=line_bits / link.rate_bits,
        congestion_control=report.congestion_control,
        retransmits=report.retransmits,
        emulator_cpu_s_per_gb=cpu_s / max(goodput_bits * (end - begin) / 8e9, 1e-9),
        emulator_cpu_share=cpu_s / (end - begin),
        worst_late_ms=after.worst_late_s * 1e3,
        device_drops=after.ab.device_drops + after.ba.device_drops,
    )


def _run(link: WanLink, side: Side, *args: str) -> subprocess.Popen[bytes]:
    return link.run_in(
        side,
        [sys.executable, "-S", "-m", "bench.wanlink.traffic", *args],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
