"""What is measured of one link: goodput, round trip, clock offset, wire ratio, each with its age.

Goodput comes from the pace of messages the sender did not mark as limited by its own work: only
those say what the link can carry. The others, and short bursts, can only show that it is faster
than thought.
"""

from __future__ import annotations

from prfaas.clock import Clock

WINDOW_S = 0.1
"""Link-limited time that makes one sample; shorter where it holds WINDOW_BYTES."""
WINDOW_BYTES = 1 << 20
MIN_WINDOW_S = 0.02
RAISE_WINDOW_S = 0.25
"""Span over which application-limited messages are taken together."""
IDLE_GAP_S = 1.0
NEVER_S = 1e9
"""Age of what has not been measured: finite, so that it passes through JSON."""
SAMPLE_WEIGHT = 0.5
RTT_WEIGHT = 0.25
RATIO_WEIGHT = 0.25
BURST_BDP_SHARE = 0.25
"""A burst says the truth where the bandwidth-delay product is at most this share of it: slow start
is over then. Otherwise it is a lower bound."""


class LinkMeter:
    """Measurements of one link; owns nothing, called by sessions and pings."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.goodput_bytes_per_s = 0.0
        self.rtt_s = 0.0
        self.wire_ratio = 1.0
        self._measured_s: float | None = None
        self._heard_s: float | None = None
        self._best_rtt_s = float("inf")
        self._offset_s: float | None = None
        self._last_s: float | None = None
        self._window_bytes = 0
        self._window_s = 0.0
        self._raise_start_s = 0.0
        self._raise_bytes = 0

    @property
    def age_s(self) -> float:
        """Since the other side was last heard; NEVER_S before."""
        return NEVER_S if self._heard_s is None else self._clock.now() - self._heard_s

    @property
    def goodput_age_s(self) -> float:
        """Since the goodput was last measured; NEVER_S before."""
        return NEVER_S if self._measured_s is None else self._clock.now() - self._measured_s

    def reset_clock(self) -> None:
        """The other side may be another process now: its clock is unknown."""
        self._best_rtt_s, self._offset_s = float("inf"), None

    def ping(self, sent_s: float, server_s: float) -> None:
        """A round trip that has just ended; the server's clock was read half way through it."""
        now = self._clock.now()
        rtt = now - sent_s
        self.rtt_s = rtt if self.rtt_s == 0 else self.rtt_s + RTT_WEIGHT * (rtt - self.rtt_s)
        self._heard_s = now
        if rtt <= self._best_rtt_s:
            self._best_rtt_s = rtt
            self._offset_s = server_s - (sent_s + rtt / 2)

    def local_time(self, server_s: float) -> float | None:
        """A time on the server's clock as a time on ours; off by at most half the best RTT."""
        return None if self._offset_s is None else server_s - self._offset_s

    def message(self, nbytes: int, *, app_limited: bool) -> None:
        """A message of KV frames has just arrived on any of the link's channels."""
        now = self._clock.now()
        last, self._last_s, self._heard_s = self._last_s, now, now
        self._count_for_raise(now, last, nbytes)
        if app_limited or last is None:
            return
        self._window_bytes += nbytes
        self._window_s += now - last
        full = self._window_bytes >= WINDOW_BYTES and self._window_s >= MIN_WINDOW_S
        if full or self._window_s >= WINDOW_S:
            self._measured(self._window_bytes / self._window_s)
            self._window_bytes, self._window_s = 0, 0.0

    def burst(self, nbytes: int, tail_bytes: int, tail_s: float) -> None:
        """A probe of `nbytes`, of which the last `tail_bytes` took `tail_s` to arrive."""
        if tail_s <= 0:
            return
        rate = tail_bytes / tail_s
        if rate * self.rtt_s <= BURST_BDP_SHARE * nbytes:
            self._measured(rate)
        elif rate >= self.goodput_bytes_per_s:
            self._set(rate)
        else:
            # Too short to contradict what sessions measured; do not ask again at once.
            self._measured_s = self._clock.now()

    def session(self, raw_bytes: int, wire_bytes: int) -> None:
        """What a session's KV came to on the wire."""
        if raw_bytes and wire_bytes:
            ratio = raw_bytes / wire_bytes
            known = self.wire_ratio != 1.0
            self.wire_ratio += (RATIO_WEIGHT if known else 1.0) * (ratio - self.wire_ratio)

    def _count_for_raise(self, now: float, last: float | None, nbytes: int) -> None:
        if last is None or now - last > IDLE_GAP_S:
            # The first message opens the span; its own bytes came before it.
            self._raise_start_s, self._raise_bytes = now, 0
            return
        self._raise_bytes += nbytes
        span = now - self._raise_start_s
        if span >= RAISE_WINDOW_S:
            rate = self._raise_bytes / span
            if rate > self.goodput_bytes_per_s:
                self._set(rate)
            self._raise_start_s, self._raise_bytes = now, 0

    def _measured(self, rate: float) -> None:
        old = self.goodput_bytes_per_s
        self._set(rate if old == 0 else old + SAMPLE_WEIGHT * (rate - old))

    def _set(self, rate: float) -> None:
        self.goodput_bytes_per_s = rate
        self._measured_s = self._clock.now()
