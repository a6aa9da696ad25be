"""A network in virtual time: seeded, and the same to the byte every time.

Nothing happens but what was scheduled, and nobody waits for real. Streams keep their order, as
those of gRPC do: a lost packet is a pause of its stream, and what a cut stream had under way never
arrives. Streams of one direction share the link's rate.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prfaas.errors import PrfaasError
from prfaas.frames import Frame, crc32c, parse_all


class Timer:
    """Something scheduled; `cancel` any time."""

    __slots__ = ("call", "cancelled")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Simulation:
    """Owns virtual time, the seeded chance of everything, and the log of all that happened."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.log: list[str] = []
        self._events: list[tuple[float, int, Timer]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> Timer:
        """Call in so many seconds; what is due at the same time happens in the order scheduled."""
        timer = Timer(lambda: call(*args))
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, timer))
        return timer

    def note(self, text: str) -> None:
        self.log.append(f"{self.now_s:.6f} {text}\n")

    def run(self, until_s: float, check: Callable[[], None] = lambda: None) -> bool:
        """Everything that happens until then, with `check` after each event; whether nothing was
        left to happen.
        """
        while self._events:
            at_s, _, timer = self._events[0]
            if timer.cancelled:
                heapq.heappop(self._events)
                continue
            if at_s > until_s:
                return False
            heapq.heappop(self._events)
            self.now_s = at_s
            timer.call()
            check()
        return True


@dataclass(frozen=True, slots=True)
class Weather:
    """What the link does to messages; the chances are of each message."""

    latency_s: float = 0.02
    jitter_s: float = 0.0
    """At most so much more; other streams overtake."""
    bytes_per_s: float = 1e6
    loss: float = 0.0
    """It has to be sent again: its stream stands still for `retransmit_s`."""
    retransmit_s: float = 0.2
    duplicate: float = 0.0
    """Of a message on a lane: it comes again later. gRPC never does that; the machine stands it."""
    corrupt: float = 0.0
    """One bit is flipped."""
    cut: float = 0.0
    """Its stream breaks on the way."""


class End:
    """One end of a stream; its owner sets what happens on it."""

    def __init__(self, stream: Stream, way: int) -> None:
        self.stream = stream
        self.way = way
        """0: sends up, 1: sends down."""
        self.on_message: Callable[[bytes], None] = _ignore
        self.on_taken: Callable[[], None] = _ignore
        """The last message sent has left: the transport takes another."""
        self.on_end: Callable[[], None] = _ignore
        """The stream broke, or the other end closed it and all it had sent is here."""
        self.last_arrival_s = 0.0
        self.over = False

    def send(self, data: bytes) -> None:
        """Dropped where the stream is broken: its end is on the way."""
        self.stream.net.carry(self, data)

    def close(self) -> None:
        """In order: what was sent arrives first. Nothing is heard here any more."""
        self.over = True
        self.stream.net.carry_close(self)


class Stream:
    """Two ends; `cut` breaks it at once."""

    def __init__(self, net: SimNet, name: str, lane: bool) -> None:
        self.net = net
        self.name = name
        self.lane = lane
        self.broken = False
        self.ends = (End(self, 0), End(self, 1))

    def cut(self) -> None:
        """What is under way is lost; each end learns of it in its own time."""
        if self.broken:
            return
        self.broken = True
        net = self.net
        net.cuts += 1
        net.sim.note(f"cut {self.name}")
        for end in self.ends:
            delay_s = net.sim.random.uniform(0.0, 4 * net.weather.latency_s)
            net.sim.after(delay_s, _end, end)


class SimNet:
    """The link between two agents: opens streams and carries what is sent on them."""

    def __init__(self, sim: Simulation, weather: Weather) -> None:
        self.sim = sim
        self.weather = weather
        self.cuts = 0
        self.flipped = 0
        self.silent = False
        """Nothing arrives any more, and no stream says so."""
        self._streams: list[Stream] = []
        self._free_s = [0.0, 0.0]

    def open(self, name: str, *, lane: bool) -> Stream:
        stream = Stream(self, name, lane)
        self._streams = [s for s in self._streams if not s.broken]
        self._streams.append(stream)
        return stream

    @property
    def streams(self) -> list[Stream]:
        """Those that are not broken."""
        return [stream for stream in self._streams if not stream.broken]

    def carry(self, end: End, data: bytes) -> None:
        stream, sim, weather = end.stream, self.sim, self.weather
        start_s = max(sim.now_s, self._free_s[end.way])
        left_s = self._free_s[end.way] = start_s + len(data) / weather.bytes_per_s
        sim.after(left_s - sim.now_s, _taken, end)
        if stream.broken or self.silent:
            return
        if sim.random.random() < weather.cut:
            sim.after(left_s - sim.now_s + weather.latency_s / 2, stream.cut)
        pause_s = weather.latency_s + sim.random.uniform(0.0, weather.jitter_s)
        if sim.random.random() < weather.loss:
            pause_s += weather.retransmit_s
        end.last_arrival_s = max(end.last_arrival_s, left_s + pause_s)
        sim.after(end.last_arrival_s - sim.now_s, self._arrive, end, self._flipped(data))
        if stream.lane and sim.random.random() < weather.duplicate:
            again_s = end.last_arrival_s - sim.now_s + sim.random.uniform(0.0, 0.2)
            sim.after(again_s, self._arrive, end, data)

    def carry_close(self, end: End) -> None:
        stream = end.stream
        if stream.broken or self.silent:
            return
        other = stream.ends[1 - end.way]
        at_s = max(end.last_arrival_s, self.sim.now_s + self.weather.latency_s)
        self.sim.after(at_s - self.sim.now_s, _end, other)

    def _arrive(self, end: End, data: bytes) -> None:
        stream = end.stream
        other = stream.ends[1 - end.way]
        if stream.broken or self.silent or other.over:
            return
        self.sim.note(f"{stream.name} {'down' if end.way else 'up'} {len(data)} {crc32c(data):x}")
        other.on_message(data)

    def _flipped(self, data: bytes) -> bytes:
        if self.sim.random.random() >= self.weather.corrupt:
            return data
        self.flipped += 1
        bit = self.sim.random.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)


def read_frames(end: End, data: bytes) -> list[Frame]:
    """Frames of a message; none where it is broken: then so is its stream."""
    try:
        return list(parse_all(data))
    except PrfaasError:
        end.stream.cut()
        return []


def _ignore(*_: object) -> None:
    return


def _taken(end: End) -> None:
    if not end.stream.broken:
        end.on_taken()


def _end(end: End) -> None:
    if not end.over:
        end.over = True
        end.on_end()
