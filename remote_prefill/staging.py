"""Staging at D: contiguous extents of shared memory, reserved before a session opens.

An extent whose owner has released it while a decode still writes stays taken until that decode
ends, so late bytes never reach the next owner.
"""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
import numpy.typing as npt

from prfaas.errors import InvalidRequest, Overloaded

ALIGN_BYTES = 64


class StagingExtent:
    """`nbytes` at `offset` of the staging memory. The owner calls `release` once."""

    def __init__(
        self, pool: StagingPool, offset: int, nbytes: int, buffer: npt.NDArray[np.uint8]
    ) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.buffer = buffer
        self._pool = pool
        self._pins = 0
        self.released = False

    def pin(self) -> bool:
        """Keep the bytes for a write that may outlast the owner; False once released."""
        if self.released:
            return False
        self._pins += 1
        return True

    def unpin(self) -> None:
        """The write has ended."""
        self._pins -= 1
        self._give_back()

    def release(self) -> None:
        """The owner is done. Idempotent."""
        if not self.released:
            self.released = True
            self._give_back()

    def _give_back(self) -> None:
        if self.released and self._pins == 0:
            self._pool.give_back(self)


class StagingPool:
    """First-fit allocator over one staging segment; waiting sessions are served in order."""

    def __init__(self, memory: memoryview, max_waiting: int) -> None:
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._max_waiting = max_waiting
        self.capacity = self._memory.nbytes // ALIGN_BYTES * ALIGN_BYTES
        self._free: list[tuple[int, int]] = [(0, self.capacity)]
        """(offset, size), by offset, no two adjacent."""
        self._waiting: deque[tuple[int, asyncio.Future[StagingExtent]]] = deque()
        self.used_bytes = 0
        self.extents = 0

    @property
    def free_bytes(self) -> int:
        """The largest extent that could be had at once; none while others wait."""
        return 0 if self._waiting else max((size for _, size in self._free), default=0)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def reserve(self, nbytes: int, timeout_s: float) -> StagingExtent:
        """An extent, waiting for it at most `timeout_s`.

        Raises InvalidRequest for what can never fit, Overloaded where it does not fit in time.
        """
        if _aligned(nbytes) > self.capacity:
            raise InvalidRequest(f"{nbytes} bytes can never fit staging of {self.capacity}")
        if not self._waiting and (extent := self._take(nbytes)) is not None:
            return extent
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} sessions wait for staging already")
        future: asyncio.Future[StagingExtent] = asyncio.get_running_loop().create_future()
        entry = (nbytes, future)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        except BaseException as exc:
            if future.done():  # granted in the very moment we gave up
                future.result().release()
            else:
                self._waiting.remove(entry)
                self._serve()
            if isinstance(exc, TimeoutError):
                raise Overloaded(f"no staging of {nbytes} bytes in {timeout_s:.1f} s") from None
            raise

    def give_back(self, extent: StagingExtent) -> None:
        """For extents: the bytes are free."""
        size = _aligned(extent.nbytes)
        self.used_bytes -= size
        self.extents -= 1
        merged: list[tuple[int, int]] = []
        for offset, length in sorted([*self._free, (extent.offset, size)]):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((offset, length))
        self._free = merged
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            nbytes, future = self._waiting[0]
            extent = self._take(nbytes)
            if extent is None:
                return
            self._waiting.popleft()
            future.set_result(extent)

    def _take(self, nbytes: int) -> StagingExtent | None:
        size = _aligned(nbytes)
        for index, (offset, length) in enumerate(self._free):
            if length >= size:
                rest = [(offset + size, length - size)] if length > size else []
                self._free[index : index + 1] = rest
                self.used_bytes += size
                self.extents += 1
                return StagingExtent(self, offset, nbytes, self._memory[offset : offset + nbytes])
        return None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
