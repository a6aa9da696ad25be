"""How fast a link delivers, by when whole messages arrive on connections that share it."""

from __future__ import annotations

from dataclasses import dataclass

EDGE_SHARE = 0.25
"""Of a span, at either end: where a pause is looked for to begin and to end at."""
GRAIN_S = 0.002
"""Messages so close together have arrived at once."""
MOST_POINTS = 1024


@dataclass(frozen=True, slots=True)
class Span:
    """What makes one sample: `seconds` at least, or a round trip where that is longer, and so many
    of its largest `messages`; or `longest_s` if it does not come to that.
    """

    seconds: float
    messages: int
    longest_s: float = float("inf")


class DeliveryRate:
    """One sample after the other of what arrives; owns nothing.

    Messages of several connections arrive whole, and together: bytes that were sent before a span
    count for it, so that its rate is too high, and the highest of many such rates far too high. So
    a span begins at the end of such a burst, just before a pause, without its bytes, and ends at
    the end of another. As with the delivery rate of BBR, a sample covers a round trip at least, and
    what comes first after a silence is no part of it.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self._times: list[float] = []
        self._totals: list[int] = []
        self._largest = 0

    def restart(self) -> None:
        """Nothing of what came so far belongs together with what comes."""
        self._times.clear()
        self._totals.clear()
        self._largest = 0

    def add(self, now_s: float, nbytes: int, rtt_s: float) -> float | None:
        """Count a message; the rate in bytes per second where a span is full, which begins anew."""
        times, totals = self._times, self._totals
        if not times or len(times) >= MOST_POINTS:
            self._open(now_s)
            return None
        self._largest = max(self._largest, nbytes)
        total, took_s = totals[-1] + nbytes, now_s - times[0]
        if now_s - times[-1] <= GRAIN_S:
            totals[-1] = total
            return None
        span = self._span
        full = took_s >= max(span.seconds, rtt_s) and totals[-1] >= span.messages * self._largest
        if not full and took_s < span.longest_s:
            times.append(now_s)
            totals.append(total)
            return None
        rate = total / took_s if len(times) == 1 else self._rate(now_s)
        self._open(now_s)
        return rate

    def _open(self, now_s: float) -> None:
        """With a message whose own bytes came before."""
        self.restart()
        self._times.append(now_s)
        self._totals.append(0)

    def _rate(self, now_s: float) -> float | None:
        """Between the longest pauses near both ends; `now_s` ends the pause after the last one."""
        times = self._times
        edge_s = EDGE_SHARE * (times[-1] - times[0])
        pauses = [after - at for at, after in zip(times, [*times[1:], now_s], strict=True)]
        early = [at for at, time in enumerate(times) if time - times[0] <= edge_s]
        late = [at for at, time in enumerate(times) if times[-1] - time <= edge_s]
        first = max(early, key=lambda at: pauses[at])
        last = max(late, key=lambda at: pauses[at])
        if last <= first:
            return None
        return (self._totals[last] - self._totals[first]) / (times[last] - times[first])
