"""What D measures of one link: goodput, round trip, clock offset, wire ratio, what limits it.

Goodput comes from the pace of messages the sender did not mark as limited by its own work: only
those say what the link can carry. The others, and short bursts, can only show that it is faster
than thought.
"""

from __future__ import annotations

from prfaas.clock import Clock
from prfaas.session_messages import ReceiverReport
from prfaas.telemetry import LinkLimit
from remote_prefill.delivery_rate import DeliveryRate, Span
from remote_prefill.link_limit import LinkHistory, Look, StallClock, judge
from remote_prefill.link_sampler import LoopLoad

LINK_LIMITED = Span(seconds=0.1, messages=8, longest_s=0.4)
"""Messages that show the link's pace: many short samples, of which an average is formed."""
ANY = Span(seconds=0.25, messages=32)
"""All messages: a sample is to be good by itself, as the fastest ones count. Some messages are
always on their way, one on each connection, and count for a span or not."""
IDLE_GAP_S = 1.0
NEVER_S = 1e9
"""Age of what has not been measured: finite, so that it passes through JSON."""
SAMPLE_WEIGHT = 0.5
RTT_WEIGHT = 0.25
RATIO_WEIGHT = 0.25
BURST_BDP_SHARE = 0.25
"""A burst says the truth where the bandwidth-delay product is at most this share of it: slow start
is over then. Otherwise it is a lower bound."""
BASE_RTT_S = 150.0
"""The shortest round trip is that of the last one or two spans of so long: routes change."""


class LinkMeter:
    """Measurements of one link; owns nothing, called by sessions, pings and, each LOOK_S, `look`.

    `load` is that of the thread that takes what comes.
    """

    def __init__(self, clock: Clock, load: LoopLoad | None = None) -> None:
        self._clock = clock
        self._load = load or LoopLoad(clock)
        self.goodput_bytes_per_s = 0.0
        self.rtt_s = 0.0
        self.wire_ratio = 1.0
        self._measured_s: float | None = None
        self._heard_s: float | None = None
        self._best_rtt_s = float("inf")
        self._offset_s: float | None = None
        self._last_s: float | None = None
        self._link_limited = DeliveryRate(LINK_LIMITED)
        self._all = DeliveryRate(ANY)
        self._sample_before = 0.0
        """Of `_all`."""
        self.held_bytes = 0
        """Received and not verified, at the last look."""
        self._base_rtt = _ShortestRtt()
        self._history = LinkHistory()
        self._stalls = StallClock()
        self._looked_s: float | None = None
        self._came_bytes = 0
        self._came_unlimited_bytes = 0
        self._backlogged = False
        """The sender had more than left at once, when it last sent anything."""

    @property
    def queueing_s(self) -> float:
        """What the round trip is over the shortest of the last minutes."""
        return max(0.0, self.rtt_s - self._base_rtt.rtt_s)

    @property
    def rate_bytes_per_s(self) -> float:
        """What has come in the last second."""
        return self._history.rate_bytes_per_s

    @property
    def stalled_s(self) -> float:
        """So long nothing has come although it should; 0 below a second."""
        return self._stalls.stalled_s

    @property
    def stalls(self) -> int:
        return self._stalls.stalls

    @property
    def busy_share(self) -> float:
        """Of the last second: this agent's thread had no time to spare, or frames waited for a
        thread to decode them.
        """
        return max(self._load.busy_share, self._history.backlog_share)

    @property
    def limit(self) -> LinkLimit:
        """What limits the link, as far as the receiver can see: that its own credit is too small
        for the path looks to it as if the sender had nothing to send.
        """
        return judge(self._history.evidence(receiver_busy_share=self.busy_share))

    def look(self, *, sessions: int, draining: bool, backlog: bool, held_bytes: int) -> None:
        """How things stand now. `draining`: a session is sealed and more of it is on its way;
        `backlog`: frames wait to be decoded.
        """
        now = self._clock.now()
        span_s = 0.0 if self._looked_s is None else now - self._looked_s
        self._looked_s, self.held_bytes = now, held_bytes
        came = self._came_bytes
        if came:
            self._backlogged = self._came_unlimited_bytes * 2 >= came
        if not sessions:
            self._backlogged = False
        self._came_bytes = self._came_unlimited_bytes = 0
        more_to_come = sessions > 0 and (self._backlogged or draining)
        self._stalls.look(now, waiting=more_to_come, moved=came > 0)
        self._history.add(
            now,
            Look(
                span_s=span_s,
                open=sessions > 0,
                pressed=more_to_come or backlog,
                backlog=backlog,
                moved_bytes=came,
            ),
        )

    def report(self, free_staging_bytes: int) -> ReceiverReport:
        """What ACKs tell the sender of this end."""
        return ReceiverReport(
            busy_share=self.busy_share,
            held_bytes=self.held_bytes,
            free_staging_bytes=free_staging_bytes,
            rtt_s=self.rtt_s,
            queueing_s=self.queueing_s,
            goodput_age_s=self.goodput_age_s,
        )

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
        self._base_rtt.add(now, rtt)
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
        self._came_bytes += nbytes
        self._came_unlimited_bytes += 0 if app_limited else nbytes
        if app_limited:
            self._link_limited.restart()
        sample = self._link_limited.add(now, nbytes, 0.0)
        if sample is not None:
            self._measured(sample)

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
        """Two samples in a row have to be faster than what is known, and the slower of them is
        believed: the highest of many has the most of chance in it.
        """
        if last is not None and now - last > IDLE_GAP_S:
            self._all.restart()
        sample = self._all.add(now, nbytes, self.rtt_s)
        if sample is None:
            return
        slower, self._sample_before = min(sample, self._sample_before), sample
        if slower > self.goodput_bytes_per_s:
            self._set(slower)

    def _measured(self, rate: float) -> None:
        old = self.goodput_bytes_per_s
        self._set(rate if old == 0 else old + SAMPLE_WEIGHT * (rate - old))

    def _set(self, rate: float) -> None:
        self.goodput_bytes_per_s = rate
        self._measured_s = self._clock.now()


class _ShortestRtt:
    """The least of the round trips of the current span of BASE_RTT_S and of the one before."""

    def __init__(self) -> None:
        self.rtt_s = 0.0
        self._start_s: float | None = None
        self._before_s = self._now_s = float("inf")

    def add(self, now_s: float, rtt_s: float) -> None:
        if self._start_s is None or now_s - self._start_s >= BASE_RTT_S:
            self._start_s = now_s
            self._before_s, self._now_s = self._now_s, float("inf")
        self._now_s = min(self._now_s, rtt_s)
        self.rtt_s = min(self._before_s, self._now_s)
