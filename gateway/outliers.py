"""Engines that are much worse than the others: slower tokens, or more failures, get a rest."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prfaas.clock import Clock

logger = logging.getLogger(__name__)

SAMPLES = 10
"""Answers before an engine is judged, and streams before its pace is."""
WEIGHT = 0.1
"""Of one answer in a moving average."""
SLOWER = 3.0
"""Times the time between two tokens that the others' median takes."""
FAILING, FAILING_MORE = 0.25, 3.0
"""Share of answers that fail, and so many times that of the others' median."""
MOST_SHARE = 3
"""At most one engine of so many is out at a time; of two engines, one."""
REST_FIRST_S, REST_MOST_S = 10.0, 80.0
"""How long it is out: twice as long each time."""
GOOD_FOR_S = 300.0
"""In for so long, and the next rest is a short one again."""


@dataclass(slots=True)
class _Judged:
    answers: int = 0
    failing: float = 0.0
    streams: int = 0
    gap_s: float = 0.0
    rest_s: float = REST_FIRST_S
    until: float = 0.0
    """End of its last rest."""


class Outliers:
    """Compares engines with each other by how they answer; nothing to close.

    Breakers see an engine that fails several times in a row. This sees one that fails now and
    then, and one that works but slowly: a throttled card, a bad link, a noisy neighbour. An
    engine alone, or all of them together, are never out.
    """

    def __init__(self, clock: Clock, on_eject: Callable[[str, float], None]) -> None:
        """`on_eject(engine, until)` hears when one goes out."""
        self._clock = clock
        self._on_eject = on_eject
        self._engines: dict[str, _Judged] = {}
        self._ejections: dict[tuple[str, str], int] = {}

    def out(self, engine: str) -> bool:
        """It gets nothing now where others can take it."""
        judged = self._engines.get(engine)
        return judged is not None and judged.until > self._clock.now()

    def answered(self, engine: str, failed: bool) -> None:
        """One more answer, or what should have been one."""
        judged = self._of(engine)
        judged.answers += 1
        judged.failing += (float(failed) - judged.failing) * _weight(judged.answers)
        if failed and judged.answers >= SAMPLES and judged.failing > FAILING:
            others = [each.failing for each in self._others(engine) if each.answers >= SAMPLES]
            if others and judged.failing > FAILING_MORE * statistics.median(others):
                self._eject(engine, judged, "failing")

    def paced(self, engine: str, gap_s: float) -> None:
        """A stream went by, with so much time between two of its tokens."""
        judged = self._of(engine)
        judged.streams += 1
        judged.gap_s += (gap_s - judged.gap_s) * _weight(judged.streams)
        if judged.streams >= SAMPLES:
            others = [each.gap_s for each in self._others(engine) if each.streams >= SAMPLES]
            # Of two that differ nobody can say which one is as it should be.
            if len(others) > 1 and judged.gap_s > SLOWER * statistics.median(others):
                self._eject(engine, judged, "slow")

    def forget(self, engine: str) -> None:
        """It was lost: what comes back is another one."""
        self._engines.pop(engine, None)

    def left(self, engine: str) -> None:
        """It does not come back."""
        self.forget(engine)
        for key in [key for key in self._ejections if key[0] == engine]:
            del self._ejections[key]

    def ejections(self) -> Iterator[tuple[str, str, int]]:
        """Engine, reason and how often."""
        for (engine, reason), count in self._ejections.items():
            yield engine, reason, count

    def _of(self, engine: str) -> _Judged:
        judged = self._engines.get(engine)
        if judged is None:
            judged = self._engines[engine] = _Judged()
        return judged

    def _others(self, engine: str) -> list[_Judged]:
        now = self._clock.now()
        return [
            judged
            for name, judged in self._engines.items()
            if name != engine and judged.until <= now
        ]

    def _eject(self, engine: str, judged: _Judged, reason: str) -> None:
        now = self._clock.now()
        out = sum(each.until > now for each in self._engines.values())
        if judged.until > now or out >= max(1, len(self._engines) // MOST_SHARE):
            return
        rest_s = REST_FIRST_S if now - judged.until > GOOD_FOR_S else judged.rest_s
        # What comes back is judged by what it does then.
        self._engines[engine] = _Judged(rest_s=min(2 * rest_s, REST_MOST_S), until=now + rest_s)
        self._ejections[engine, reason] = self._ejections.get((engine, reason), 0) + 1
        logger.warning("engine %s is %s beside the others: out for %g s", engine, reason, rest_s)
        self._on_eject(engine, now + rest_s)


def _weight(count: int) -> float:
    """A plain mean at first."""
    return max(WEIGHT, 1 / count)
