"""The agent's end of KvPort connections: an engine's, and those of its other processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import secrets
from collections.abc import AsyncIterator

from prfaas.errors import EngineUnavailable
from prfaas_connect.port.layout import KvLayout
from prfaas_connect.port.messages import (
    PREFIX,
    Hello,
    PortError,
    PortMessage,
    decode,
    encode,
    sizes,
)

log = logging.getLogger(__name__)

MESSAGE_BYTES_ESTIMATE = 512
"""A queued message counts as so many bytes against the bound on the send buffer."""
_READ_BYTES = 64 << 10


class PortClosed(EngineUnavailable):
    """The engine's connection is gone."""

    kind = "engine_disconnected"


class PortConn:
    """One connection: messages both ways and a ring. Closed by the PortServer."""

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ring: mmap.mmap,
        max_queue: int,
    ) -> None:
        self.name = name
        self.ring = memoryview(ring)
        self._reader = reader
        self._writer = writer
        self._max_buffer = max_queue * MESSAGE_BYTES_ESTIMATE
        self.closed = False

    def __repr__(self) -> str:
        state = "CLOSED" if self.closed else "OPEN"
        return f"<{type(self).__name__} {self.name!r} {state}>"

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> None:
        """Queue a message. Raises PortClosed when the engine is gone or has stopped reading."""
        if self.closed:
            raise PortClosed("the engine has disconnected")
        if len(blob) == 0 and self._writer.transport.get_write_buffer_size() > self._max_buffer:
            self.close()
            raise PortClosed("the engine has stopped reading from its port")
        self._writer.write(encode(message, blob))

    async def __aiter__(self) -> AsyncIterator[tuple[PortMessage, bytes]]:
        """Messages until the engine disconnects; a malformed one ends the connection."""
        try:
            pending = bytearray()
            while data := await self._reader.read(_READ_BYTES):
                pending += data
                at = 0
                while (spans := _first_message(pending, at)) is not None:
                    body, blob, end = spans
                    yield decode(bytes(pending[body:blob])), bytes(pending[blob:end])
                    at = end
                del pending[:at]
        except ConnectionError:
            return
        except PortError as exc:
            log.warning("kvport: engine %s broke the protocol: %s", self.name, exc)
        finally:
            self.close()

    def close(self) -> None:
        """Cut the connection; the iterator ends. Idempotent."""
        if not self.closed:
            self.closed = True
            self._writer.close()

    async def wait_closed(self) -> None:
        """Until the socket is gone; how it broke is no news any more."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class RankConn(PortConn):
    """One more process of a connected engine: messages and a ring of its own, the engine's
    staging.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ring: mmap.mmap,
        max_queue: int,
    ) -> None:
        super().__init__(name, reader, writer, ring, max_queue)
        self.rank = rank


class EngineConn(PortConn):
    """One connected engine: Hello, messages, shared memory, and the ranks that joined it."""

    def __init__(
        self,
        hello: Hello,
        layout: KvLayout,
        connection: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ring: mmap.mmap,
        staging: mmap.mmap,
        staging_fd: int,
        max_queue: int,
    ) -> None:
        """Takes over `staging_fd`."""
        super().__init__(hello.engine, reader, writer, ring, max_queue)
        self.hello = hello
        self.layout = layout
        self.connection = connection
        self.staging = memoryview(staging)
        self.staging_fd = staging_fd
        self.ranks: dict[int, RankConn] = {}

    def close(self) -> None:
        """Cut the connection and those of the engine's ranks. Idempotent."""
        if not self.closed:
            os.close(self.staging_fd)
            for rank in list(self.ranks.values()):
                rank.close()
        super().close()


def _first_message(data: bytearray, at: int) -> tuple[int, int, int] | None:
    """Where header and blob of the message at `at` begin, and its end; None while part of it is
    still to come. Raises PortError.
    """
    body = at + PREFIX.size
    if len(data) < body:
        return None
    header_bytes, blob_bytes = sizes(data[at:body])
    blob = body + header_bytes
    end = blob + blob_bytes
    return (body, blob, end) if len(data) >= end else None


def new_connection() -> str:
    """A name for a connection that no earlier one had."""
    return secrets.token_hex(8)
