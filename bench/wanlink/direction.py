"""One direction of the link as a machine without I/O or clock: queue, line, delay, loss, faults."""

from __future__ import annotations

import math
import random
from collections import deque

from bench.wanlink.packets import Frame, cut, full_packet_bytes, wire_size
from bench.wanlink.shape import LinkChange, LinkShape, WayStats

NEVER = math.inf

_BURST_S = 0.002
"""A line that was busy so lately loses no rate: the emulator sees frames later than they came."""


class Direction:
    """Frames go in with `accept` and come out of `take_due`; times are seconds of one clock.

    A frame waits in the queue, then for the line to carry its wire bytes, then for the delay. Loss
    hits packets as they leave the line, so lost ones use up rate, as they do on a real one.
    """

    def __init__(self, shape: LinkShape, seed: int) -> None:
        self._random = random.Random(seed)
        self._shape = shape
        self._waiting: deque[tuple[int, int, float, Frame]] = deque()
        self._flying: deque[tuple[float, Frame]] = deque()
        self._queue_bytes = 0
        self._line_free_at = 0.0
        self._s_per_byte = 8 / shape.rate_bits
        self._packets_to_loss = self._draw_loss()
        self._stalled = False
        self._blackhole_until = -NEVER
        self._frames = self._packets = self._wire_bytes = 0
        self._queue_drops = self._losses = self._blackholed = self._queue_peak_bytes = 0

    def accept(self, frame: Frame, now: float) -> None:
        """Put a frame in the queue, or as many of its packets as there is room for."""
        packets, size = wire_size(frame)
        if now < self._blackhole_until:
            self._blackholed += packets
            return
        room = self._shape.queue_bytes - self._queue_bytes
        if size > room:
            fit = room // full_packet_bytes(frame) if packets > 1 else 0
            self._queue_drops += packets - fit
            if fit == 0:
                return
            frame = cut(frame, 0, fit)
            packets, size = wire_size(frame)
        if not self._waiting and now - self._line_free_at > _BURST_S:
            self._line_free_at = now
        self._waiting.append((packets, size, now, frame))
        self._queue_bytes += size
        if self._queue_bytes > self._queue_peak_bytes:
            self._queue_peak_bytes = self._queue_bytes

    def take_due(self, now: float) -> list[Frame]:
        """The frames that have arrived at the other end by now, in order."""
        if self._stalled:
            return []
        if self._waiting:
            self._send(now)
        flying = self._flying
        due = []
        while flying and flying[0][0] <= now:
            due.append(flying.popleft()[1])
        return due

    def next_due(self) -> float:
        """When `take_due` has something to give, or NEVER while nothing is on the way."""
        if self._stalled:
            return NEVER
        if self._flying:
            return self._flying[0][0]
        if self._waiting:
            _, size, arrived, _ = self._waiting[0]
            sent = self._line_free_at + size * self._s_per_byte
            return max(sent, arrived) + self._shape.delay_s
        return NEVER

    def change(self, change: LinkChange, now: float) -> None:
        """Apply it as of now; what the line has carried so far keeps the old rate."""
        shape = change.reshape(self._shape)
        if not self._stalled:
            self._send(now)
            if self._waiting and now > self._line_free_at:
                # The first frame is partly sent: that part keeps the old rate.
                sent_bytes = (now - self._line_free_at) / self._s_per_byte
                self._line_free_at = now - sent_bytes * 8 / shape.rate_bits
        if shape.loss != self._shape.loss:
            self._shape = shape
            self._packets_to_loss = self._draw_loss()
        self._shape = shape
        self._s_per_byte = 8 / shape.rate_bits
        if change.stall is not None:
            if self._stalled and not change.stall:
                self._line_free_at = max(self._line_free_at, now)
            self._stalled = change.stall
        if change.blackhole is not None:
            self._blackhole_until = NEVER if change.blackhole else -NEVER
        if change.drop_ms is not None:
            self._blackhole_until = max(self._blackhole_until, now + change.drop_ms / 1e3)
        if now < self._blackhole_until:
            self._drop_all()

    def stats(self, device_drops: int) -> WayStats:
        """The counters now, with what the kernel dropped before this direction saw it."""
        return WayStats(
            frames=self._frames,
            packets=self._packets,
            wire_bytes=self._wire_bytes,
            queue_drops=self._queue_drops,
            losses=self._losses,
            blackholed=self._blackholed,
            queue_bytes=self._queue_bytes,
            queue_peak_bytes=self._queue_peak_bytes,
            device_drops=device_drops,
        )

    def _send(self, now: float) -> None:
        """Move what the line has carried by now from the queue into the air."""
        waiting, s_per_byte, delay_s = self._waiting, self._s_per_byte, self._shape.delay_s
        while waiting:
            packets, size, arrived, frame = waiting[0]
            sent = self._line_free_at + size * s_per_byte
            if sent > now:
                return
            waiting.popleft()
            self._line_free_at = sent
            self._queue_bytes -= size
            self._frames += 1
            self._packets += packets
            self._wire_bytes += size
            due = max(sent, arrived) + delay_s
            if self._packets_to_loss >= packets:
                self._packets_to_loss -= packets
                self._flying.append((due, frame))
            else:
                self._flying.extend((due, part) for part in self._survivors(frame, packets))

    def _survivors(self, frame: Frame, packets: int) -> list[Frame]:
        """The runs of packets of a frame between those that are lost."""
        parts, start = [], 0
        while start + self._packets_to_loss < packets:
            lost = start + int(self._packets_to_loss)
            if lost > start:
                parts.append(cut(frame, start, lost))
            self._losses += 1
            start = lost + 1
            self._packets_to_loss = self._draw_loss()
        self._packets_to_loss -= packets - start
        if start < packets:
            parts.append(cut(frame, start, packets))
        return parts

    def _draw_loss(self) -> float:
        """How many packets get through before the next loss: geometric, so losses are independent.

        One draw for each loss and not for each packet keeps a clean link free of the cost.
        """
        loss = self._shape.loss
        if loss <= 0:
            return NEVER
        if loss >= 1:
            return 0
        return math.floor(math.log(1 - self._random.random()) / math.log1p(-loss))

    def _drop_all(self) -> None:
        self._blackholed += sum(packets for packets, *_ in self._waiting)
        self._blackholed += sum(wire_size(frame)[0] for _, frame in self._flying)
        self._waiting.clear()
        self._flying.clear()
        self._queue_bytes = 0
