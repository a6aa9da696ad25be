"""An engine's port without a socket: memory to read and write, and a list of what was sent."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from prfaas_connect.port.messages import (
    PORT_VERSION,
    PortError,
    PortMessage,
    Record,
    Welcome,
    decode,
    encode,
    sizes,
)
from prfaas_connect.port.ring import RingAllocator

M = TypeVar("M", bound=PortMessage)


class FakePort:
    """Owns a ring and a staging area in this process; the test plays the agent.

    `sent` are the messages with their blobs, after a round trip through their encoding.
    """

    def __init__(
        self,
        *,
        ring_bytes: int = 1 << 20,
        staging_bytes: int = 1 << 20,
        verify_import: bool = False,
        connected: bool = True,
    ) -> None:
        self.sent: list[tuple[PortMessage, bytes]] = []
        self.started = False
        self.closed = False
        self.ring_memory = np.zeros(ring_bytes, dtype=np.uint8)
        self.staging_memory = np.zeros(staging_bytes, dtype=np.uint8)
        self.allocator = RingAllocator(ring_bytes)
        self._connected = connected
        self._welcome = Welcome(
            PORT_VERSION, "fake agent", ring_bytes, staging_bytes, verify_import
        )

    # --- KvPort ---

    def start(self) -> None:
        self.started = True

    def close(self) -> None:
        self.closed = True

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def welcome(self) -> Welcome | None:
        return self._welcome if self._connected else None

    @property
    def ring_bytes(self) -> int:
        return self.allocator.capacity if self._connected else 0

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> bool:
        data = encode(message, blob)
        if not self._connected:
            return False
        header_bytes, blob_bytes = sizes(data[:8])
        assert len(data) == 8 + header_bytes + blob_bytes
        self.sent.append((decode(data[8 : 8 + header_bytes]), data[8 + header_bytes :]))
        return True

    def ring_reserve(self, nbytes: int) -> int | None:
        return self.allocator.reserve(nbytes) if self._connected else None

    def ring(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._view(self.ring_memory, offset, nbytes)

    def staging(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._view(self.staging_memory, offset, nbytes)

    # --- the test's side ---

    def disconnect(self) -> None:
        """The agent goes; what was reserved is void."""
        self._connected = False

    def reconnect(self) -> None:
        """An agent comes, with fresh memory."""
        self._connected = True
        self.allocator = RingAllocator(self.allocator.capacity)

    def of(self, kind: type[M]) -> list[M]:
        """All messages of one kind sent so far."""
        return [message for message, _ in self.sent if isinstance(message, kind)]

    def take(self, kind: type[M]) -> list[tuple[M, bytes]]:
        """Like `of`, with blobs, and forgets them."""
        taken = [(m, blob) for m, blob in self.sent if isinstance(m, kind)]
        self.sent = [(m, blob) for m, blob in self.sent if not isinstance(m, kind)]
        return taken

    def record_bytes(self, record: Record) -> bytes:
        """What a record carries, as long as it has not been freed."""
        return self.ring(record.offset, record.nbytes).tobytes()

    def _view(
        self, memory: npt.NDArray[np.uint8], offset: int, nbytes: int
    ) -> npt.NDArray[np.uint8]:
        if not self._connected:
            raise PortError("not connected to an agent")
        if offset < 0 or offset + nbytes > len(memory):
            raise PortError(f"[{offset}, {offset + nbytes}) is outside shared memory")
        return memory[offset : offset + nbytes]
