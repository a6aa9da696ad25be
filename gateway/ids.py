"""Random ids in hex, from the kernel's randomness taken a page at a time."""

from __future__ import annotations

import os

PAGE_BYTES = 2048


class Ids:
    """Ids that nobody can guess, no two alike; nothing to close.

    A call of the kernel for each of the four that a request needs cost more than its decision.
    """

    def __init__(self) -> None:
        self._page = ""
        self._at = 0

    def hex(self, size: int) -> str:
        """`size` bytes, which are never given out again."""
        at = self._at
        end = at + 2 * size
        if end > len(self._page):
            self._page, at, end = os.urandom(max(PAGE_BYTES, size)).hex(), 0, 2 * size
        self._at = end
        return self._page[at:end]
