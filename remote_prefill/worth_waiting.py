"""Whether a transfer is still worth waiting for, or D would compute the rest sooner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

LOOK_S = 0.25
"""Between two looks at a transfer."""
WINDOW_S = 2.0
"""Over which its rate is taken: the layers of a chunk come in bursts."""
MARGIN_S = 1.0
"""It may take so much longer than allowed, for what neither estimate knows."""
STILL_S = 1.0
"""One that does not move at all is not judged: that has a deadline, and may be mended."""
SLOWER = "slower"
"""Phase of what is given up for that."""
PATIENCE_S = 1.0
"""For so long without a break, before it is given up."""

RecomputeSeconds = Callable[[int, int], float | None]
"""Of so many tokens behind so many that are there, at D as it is now; None: not known."""


class WorthWaiting:
    """Follows one transfer from its first bytes on; nothing to close."""

    def __init__(self, slower_by: float) -> None:
        """It may need so many times as long for the rest as D to compute it."""
        self._slower_by = slower_by
        self._seen: deque[tuple[float, int]] = deque()
        """Times, and bytes that had come by then."""
        self._slow_since: float | None = None
        self._moved_at = 0.0

    def look(self, now: float, came_bytes: int, left_bytes: int, recompute_s: float | None) -> bool:
        """False where it is to be given up. To be asked each LOOK_S; what has not begun is governed
        by its deadlines.
        """
        if not came_bytes or recompute_s is None:
            return True
        if not self._seen or came_bytes > self._seen[-1][1]:
            self._moved_at = now
        elif now - self._moved_at >= STILL_S:
            self._seen.clear()
            self._slow_since = None
        self._seen.append((now, came_bytes))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        if now - since < PATIENCE_S:
            return True
        rate = (came_bytes - before) / (now - since)
        most_s = self._slower_by * recompute_s + MARGIN_S
        if left_bytes <= most_s * rate:
            self._slow_since = None
            return True
        if self._slow_since is None:
            self._slow_since = now
        return now - self._slow_since < PATIENCE_S
