"""Random ids in hex, from the kernel's randomness taken a page at a time."""

from __future__ import annotations

import os

PAGE_BYTES = 2048


class Ids:
    """Ids that nobody can guess, no two alike; nothing to close.

    A call of the kernel for each of the four that a request needs cost more than its decision.
    """

    def __init__(self, sample: float = 1.0) -> None:
        """`sample`: share of the traces that begin here which are to be recorded."""
        self._page = ""
        self._at = 0
        self._below = round(sample * (1 << 32))

    def hex(self, size: int) -> str:
        """`size` bytes, which are never given out again."""
        at = self._at
        end = at + 2 * size
        if end > len(self._page):
            self._page, at, end = os.urandom(max(PAGE_BYTES, size)).hex(), 0, 2 * size
        self._at = end
        return self._page[at:end]

    def new_trace(self) -> tuple[str, str]:
        """Id and flags of a trace that begins here; the id says whether it is recorded."""
        trace_id = self.hex(16)
        return trace_id, "01" if int(trace_id[:8], 16) < self._below else "00"
