"""A link that transfers share equally, each no faster than its KV is computed."""

from __future__ import annotations

import math
from collections.abc import Callable

from policies.simulator.events import EventLoop
from policies.simulator.job import Job

_EPS = 1e-6
"""Bytes that count as none."""


class Flow:
    """One transfer: bytes made so far, bytes sent so far, and at what rates."""

    __slots__ = ("backlog", "job", "left", "made_per_s", "rate", "sealed", "stream_left")

    def __init__(self, job: Job, wire_bytes: float) -> None:
        self.job = job
        self.left = wire_bytes
        """Bytes not yet sent, made or not."""
        self.backlog = 0.0
        """Bytes made and not yet sent."""
        self.stream_left = 0.0
        """Bytes still to be made before the seal."""
        self.made_per_s = 0.0
        self.rate = 0.0
        self.sealed = False


class SharedLink:
    """Owns the transfers on one link; nothing to close.

    Equal shares, except that a transfer whose KV is made more slowly than its share takes only what
    is made, and the others share the rest. Rates change when a transfer begins, pauses, is sealed,
    drains or ends, and when the link's own rate changes.
    """

    def __init__(self, loop: EventLoop, bytes_per_s: float, on_sent: Callable[[Job], None]) -> None:
        self._loop = loop
        self._on_sent = on_sent
        self.bytes_per_s = bytes_per_s
        self.sent_bytes = 0.0
        self.peak_flows = 0
        self._flows: list[Flow] = []
        self._since = 0.0
        self._version = 0
        self.progress_at = 0.0
        """When the last byte moved, or the link was last empty."""

    def __len__(self) -> int:
        return len(self._flows)

    def open(self, flow: Flow) -> None:
        """A transfer begins; `making` or `seal` follows at once, and shares the link anew."""
        self._advance()
        self._flows.append(flow)
        self.peak_flows = max(self.peak_flows, len(self._flows))

    def making(self, flow: Flow, stream_bytes: float, seconds: float) -> None:
        """For so many seconds from now, so many bytes of it are made evenly."""
        self._advance()
        flow.stream_left = stream_bytes
        flow.made_per_s = stream_bytes / seconds if seconds > 0 else 0.0
        if seconds <= 0:
            flow.backlog += stream_bytes
        self._retime()

    def pause(self, flow: Flow) -> None:
        """Nothing more of it is made for now."""
        self._advance()
        flow.backlog += flow.stream_left
        flow.stream_left = flow.made_per_s = 0.0
        self._retime()

    def seal(self, flow: Flow) -> None:
        """All of it is made."""
        self._advance()
        flow.sealed = True
        flow.backlog = flow.left
        flow.made_per_s = flow.stream_left = 0.0
        self._retime()

    def drop(self, flow: Flow) -> float:
        """It is given up; bytes that had been sent are all it was good for. Returns those left."""
        self._advance()
        if flow in self._flows:
            self._flows.remove(flow)
            self._retime()
        return flow.left

    def set_rate(self, bytes_per_s: float) -> None:
        self._advance()
        self.bytes_per_s = bytes_per_s
        self._retime()

    def flows(self) -> tuple[Flow, ...]:
        """Transfers under way, oldest first."""
        return tuple(self._flows)

    def to_come(self) -> float:
        """Bytes of transfers under way that have not been sent, made or not."""
        self._advance()
        return sum(flow.left for flow in self._flows)

    def sent_now(self) -> float:
        """Bytes sent so far, those under way among them."""
        self._advance()
        return self.sent_bytes

    def _advance(self) -> None:
        now = self._loop.now
        elapsed = now - self._since
        self._since = now
        if elapsed <= 0:
            return
        for flow in self._flows:
            moved = flow.rate * elapsed
            if moved > flow.left:
                moved = flow.left
            made = flow.made_per_s * elapsed
            if made:
                if made > flow.stream_left:
                    made = flow.stream_left
                flow.stream_left -= made
            backlog = flow.backlog + made - moved
            flow.backlog = backlog if backlog > 0 else 0.0
            flow.left -= moved
            self.sent_bytes += moved
            if moved > 0:
                self.progress_at = now
        if not self._flows:
            self.progress_at = now

    def _retime(self) -> None:
        """Share the link anew, and look at it again when the next backlog or transfer ends."""
        self._version += 1
        flows = self._flows
        if not flows:
            return
        left, count = self.bytes_per_s, len(flows)
        slow = [f for f in flows if f.backlog <= _EPS and not f.sealed]
        if slow:
            if len(slow) > 1:
                slow.sort(key=_made)
            for flow in slow:
                share = left / count
                flow.rate = rate = flow.made_per_s if flow.made_per_s < share else share
                left -= rate
                count -= 1
            if not count:
                return
        share = left / count
        if share <= 0:
            for flow in flows:
                if flow.backlog > _EPS or flow.sealed:
                    flow.rate = 0.0
            return
        soonest = float("inf")
        for flow in flows:
            if flow.sealed:
                flow.rate = share
                wait = flow.left / share
            elif flow.backlog > _EPS:
                flow.rate = share
                if share <= flow.made_per_s:
                    continue
                wait = flow.backlog / (share - flow.made_per_s)
            else:
                continue
            if wait < soonest:
                soonest = wait
        if soonest < float("inf"):
            self._loop.at(self._loop.now + soonest, self._look, self._version)

    def _look(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = [f for f in self._flows if f.sealed and f.left <= _EPS + 1e-12 * f.rate]
        if ended:
            self._flows = [f for f in self._flows if f not in ended]
        else:
            # Rounding: what should have drained by now has. The clock's own grain counts, or a
            # sliver could be left that no time is short enough for.
            sliver = max(1.0, 4 * math.ulp(self._loop.now) * self.bytes_per_s)
            for flow in self._flows:
                if flow.backlog < sliver and not flow.sealed:
                    flow.backlog = 0.0
                elif flow.sealed and flow.left < sliver:
                    flow.left = 0.0
        self._retime()
        for flow in ended:
            self._on_sent(flow.job)


def _made(flow: Flow) -> float:
    return flow.made_per_s
