"""Sets of sequence numbers as ranges: what has been received, verified, acknowledged."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

from prfaas.errors import ProtocolError

Range = tuple[int, int]
"""Start and end (exclusive)."""
MAX_RANGES = 4096
"""More in one message is refused."""


class SequenceSet:
    """Numbers from 0 on, kept as ascending ranges that do not touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def __repr__(self) -> str:
        return "{" + " ".join(f"[{a},{b})" for a, b in self.ranges()) + "}"

    @property
    def next(self) -> int:
        """The first number that is not there."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0

    def ranges(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)

    def add(self, number: int) -> bool:
        """False where it was there already."""
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, number) - 1
        if at >= 0 and number < ends[at]:
            return False
        self._count += 1
        left = at >= 0 and ends[at] == number
        right = at + 1 < len(starts) and starts[at + 1] == number + 1
        if left and right:
            ends[at] = ends.pop(at + 1)
            del starts[at + 1]
        elif left:
            ends[at] = number + 1
        elif right:
            starts[at + 1] = number
        else:
            starts.insert(at + 1, number)
            ends.insert(at + 1, number + 1)
        return True

    def absent(self, start: int, end: int) -> list[Range]:
        """The parts of [start, end) that are not there."""
        found: list[Range] = []
        at = bisect_right(self._ends, start)
        while start < end:
            stop = min(end, self._starts[at]) if at < len(self._starts) else end
            if start < stop:
                found.append((start, stop))
            start = self._ends[at] if at < len(self._ends) else end
            at += 1
        return found

    def discard(self, number: int) -> None:
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, number) - 1
        if at < 0 or number >= ends[at]:
            return
        self._count -= 1
        start, end = starts[at], ends[at]
        pieces = [(a, b) for a, b in ((start, number), (number + 1, end)) if a < b]
        starts[at : at + 1] = [a for a, _ in pieces]
        ends[at : at + 1] = [b for _, b in pieces]


def checked_ranges(flat: Iterable[int]) -> tuple[Range, ...]:
    """Ranges out of their flat form on the wire. Raises ProtocolError unless they are ascending,
    not empty and apart.
    """
    numbers = tuple(flat)
    if len(numbers) % 2 or len(numbers) > 2 * MAX_RANGES:
        raise ProtocolError(f"{len(numbers)} numbers are not a list of ranges")
    if any(a >= b for a, b in pairwise(numbers)):
        raise ProtocolError("ranges of sequence numbers are not in order")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))
