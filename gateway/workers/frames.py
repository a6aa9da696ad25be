"""Messages between processes of one gateway: MessagePack behind a length, over a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Generic, TypeVar

import msgspec

from prfaas.errors import ProtocolError

MAX_FRAME_BYTES = 128 << 20
"""A Watch event of the largest cache that is remembered is well below it."""
MAX_UNSENT_BYTES = 256 << 20
"""What the other side has not taken; more, and it is cut off."""
_LENGTH_BYTES = 4

M = TypeVar("M")


class Frames(Generic[M]):
    """One connection, read as messages of the kind `M`; owns it, close it with `close`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: object
    ) -> None:
        """`kind`: the type, or the union of tagged types, that comes in."""
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    async def next(self) -> M | None:
        """The next message, None at the end. Raises ProtocolError for what is none."""
        try:
            head = await self._reader.readexactly(_LENGTH_BYTES)
            length = int.from_bytes(head, "big")
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes")
            data = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise ProtocolError(f"not a message: {exc}") from exc

    def put(self, message: msgspec.Struct) -> None:
        """Send it without waiting; a side that takes nothing is cut off."""
        self.put_packed(self._encoder.encode(message))

    def put_packed(self, data: bytes) -> None:
        """The same for what is encoded already."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() + len(data) > MAX_UNSENT_BYTES:
            transport.abort()
            return
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    async def drain(self) -> None:
        """Wait until the other side has taken most of it, or is gone."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def close(self) -> None:
        """What is put already still goes out, if the other side takes it."""
        self._writer.close()
        await self._closed()

    async def abort(self) -> None:
        """At once."""
        self._writer.transport.abort()
        await self._closed()

    async def _closed(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
