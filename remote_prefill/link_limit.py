"""What limits a link just now: the evidence of the last second, and the judgement on it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from prfaas.telemetry import LinkLimit

WINDOW_S = 1.0
"""What is judged is the time since then."""
ROUNDING_S = 1e-6
"""Sums of times are not exact: a look that is so near to the window's start is not in it."""
PRESSED_SHARE = 0.75
"""Of the time; less, and the link has time to spare, so that its sender is the slow part."""
BUSY_SHARE = 0.9
"""Who is at work for so much of the time cannot do much more."""
PATH_SHARE = 0.5
STALL_S = 1.0
"""Nothing has moved for so long, although bytes are under way."""


@dataclass(frozen=True, slots=True)
class LinkEvidence:
    """Shares of the time looked at, from 0 to 1; None is what cannot be known at this end."""

    open_share: float
    """A session was open."""
    pressed_share: float = 0.0
    """Of that: there was more to send than left at once, or all was sent and not all had come."""
    sender_busy_share: float | None = None
    """The sending agent's thread had no time to spare."""
    receiver_busy_share: float | None = None
    """The receiving agent's thread had no time to spare, or frames waited there to be decoded."""
    path_busy_share: float | None = None
    """Of the pressed time: the sender's kernel held bytes that were not acknowledged. Where it
    holds none, all that left has reached the other host, which does not take more.
    """


def judge(evidence: LinkEvidence) -> LinkLimit:
    """Who keeps KV from moving faster. The receiver's own word counts more than what the sender's
    kernel shows: a relay in between takes bytes that have not reached the receiver.
    """
    if evidence.open_share <= 0:
        return LinkLimit.IDLE
    if evidence.pressed_share < PRESSED_SHARE:
        return LinkLimit.SENDER
    if evidence.sender_busy_share is not None and evidence.sender_busy_share >= BUSY_SHARE:
        return LinkLimit.SENDER
    if evidence.receiver_busy_share is not None:
        busy = evidence.receiver_busy_share >= BUSY_SHARE
        return LinkLimit.RECEIVER if busy else LinkLimit.LINK
    if evidence.path_busy_share is not None and evidence.path_busy_share < PATH_SHARE:
        return LinkLimit.RECEIVER
    return LinkLimit.LINK


@dataclass(frozen=True, slots=True)
class Look:
    """How a link stood at one moment, for the `span_s` since the look before."""

    span_s: float
    open: bool
    pressed: bool = False
    backlog: bool = False
    """Frames waited to be decoded."""
    path_busy: float | None = None
    """Share of its connections with bytes that were not acknowledged."""
    moved_bytes: int = 0
    """Arrived since the look before."""


class LinkHistory:
    """The looks of the last WINDOW_S."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Look]] = deque()

    def add(self, now_s: float, look: Look) -> None:
        self._looks.append((now_s, look))
        while self._looks[0][0] <= now_s - WINDOW_S + ROUNDING_S:
            self._looks.popleft()

    @property
    def rate_bytes_per_s(self) -> float:
        """What has moved, over all of the time."""
        span_s = sum(look.span_s for _, look in self._looks)
        moved = sum(look.moved_bytes for _, look in self._looks)
        return moved / span_s if span_s > 0 else 0.0

    @property
    def backlog_share(self) -> float:
        """Of the time in which a session was open."""
        looks = self._open()
        return _share(sum(k.span_s for k in looks if k.backlog), sum(k.span_s for k in looks))

    def evidence(
        self,
        *,
        sender_busy_share: float | None = None,
        receiver_busy_share: float | None = None,
    ) -> LinkEvidence:
        """What the looks come to, with what they cannot show."""
        looks = self._open()
        all_s = sum(look.span_s for _, look in self._looks)
        open_s = sum(look.span_s for look in looks)
        pressed = [look for look in looks if look.pressed]
        seen = [(k.span_s, k.path_busy) for k in pressed if k.path_busy is not None]
        seen_s = sum(span_s for span_s, _ in seen)
        return LinkEvidence(
            open_share=_share(open_s, all_s),
            pressed_share=_share(sum(look.span_s for look in pressed), open_s),
            sender_busy_share=sender_busy_share,
            receiver_busy_share=receiver_busy_share,
            path_busy_share=sum(s * busy for s, busy in seen) / seen_s if seen_s > 0 else None,
        )

    def _open(self) -> list[Look]:
        return [look for _, look in self._looks if look.open]


class StallClock:
    """How long nothing has moved although something should, and how often that was long."""

    def __init__(self) -> None:
        self.stalls = 0
        self.stalled_s = 0.0
        """Now; 0 while less than STALL_S."""
        self._since_s: float | None = None

    def look(self, now_s: float, *, waiting: bool, moved: bool) -> None:
        """Called again and again; `waiting`: bytes are under way, `moved`: some came since."""
        if moved or not waiting:
            self._since_s, self.stalled_s = (now_s if waiting else None), 0.0
            return
        if self._since_s is None:
            self._since_s = now_s
        stood_s = now_s - self._since_s
        if stood_s >= STALL_S:
            self.stalls += self.stalled_s == 0
            self.stalled_s = stood_s


def _share(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s > 0 else 0.0
