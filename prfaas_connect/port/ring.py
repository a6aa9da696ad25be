"""Byte ring for KV leaving an engine: contiguous regions, used and freed in the order reserved."""

from __future__ import annotations

import threading
from collections import deque


class RingAllocator:
    """Offsets within a ring of `capacity` bytes; thread-safe, never blocks.

    The engine reserves on its own thread, the port frees on its reader thread.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._regions: deque[tuple[int, int]] = deque()
        self._head = 0

    def reserve(self, nbytes: int) -> int | None:
        """Offset of `nbytes` contiguous bytes, or None while there is no room.

        Raises ValueError for a size that can never fit.
        """
        if not 0 < nbytes <= self.capacity:
            raise ValueError(f"{nbytes} bytes do not fit a ring of {self.capacity}")
        with self._lock:
            if not self._regions:
                self._head = 0
            offset = self._place(nbytes)
            if offset is not None:
                self._regions.append((offset, nbytes))
                self._head = offset + nbytes
            return offset

    def free(self, count: int) -> None:
        """Free the oldest `count` regions. Raises ValueError when fewer are reserved."""
        with self._lock:
            if not 0 <= count <= len(self._regions):
                raise ValueError(f"cannot free {count} of {len(self._regions)} ring regions")
            for _ in range(count):
                self._regions.popleft()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(nbytes for _, nbytes in self._regions)

    def _place(self, nbytes: int) -> int | None:
        if not self._regions:
            return 0
        tail = self._regions[0][0]
        wrapped = self._head <= tail
        if wrapped:
            return self._head if self._head + nbytes <= tail else None
        if self._head + nbytes <= self.capacity:
            return self._head
        return 0 if nbytes <= tail else None
