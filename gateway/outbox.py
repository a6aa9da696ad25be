"""Writes of one turn of the event loop, handed to their sockets one right after the other."""

from __future__ import annotations

import asyncio

CROWD = 4
"""With fewer at work a write goes out at once: nothing is likely to come with it."""


class Outbox:
    """Owns what is not written yet, until the loop's next turn; nothing to close.

    Whoever reads the sockets is woken by the first write, and still awake at the others: waking
    costs more than the rest of a short write. What is put for one socket goes out in order; nobody
    may write to it, or close it, but through here.
    """

    def __init__(self) -> None:
        self._held: list[tuple[asyncio.Transport, bytes]] = []

    def write(self, transport: asyncio.Transport, data: bytes, at_work: int) -> None:
        """Soon, or at once where fewer than CROWD are `at_work`."""
        if self._held:
            self._held.append((transport, data))
        elif at_work < CROWD:
            transport.write(data)
        else:
            self._held.append((transport, data))
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write what is held."""
        held, self._held = self._held, []
        for transport, data in held:
            if not transport.is_closing():
                transport.write(data)

    def close(self, transport: asyncio.Transport) -> None:
        """Close a socket after what was put for it."""
        self.flush()
        transport.close()
