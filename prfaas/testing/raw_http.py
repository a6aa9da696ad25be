"""A server that says over a socket exactly the bytes a test gives it, and answers to them read."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"content-length: 5\r\n\r\nhello"

Play = Callable[["Peer"], Awaitable[None]]


@dataclass(slots=True)
class Peer:
    """One accepted connection; closed when the play returns."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self) -> bytes:
        """One whole request. Raises asyncio.IncompleteReadError where the client has left."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name == b"content-length":
                length = int(value)
        return head + await self.reader.readexactly(length)

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def cut(self) -> None:
        """Reset, not a clean end."""
        self.writer.transport.abort()


@dataclass(slots=True)
class RawServer:
    """Owned by `raw_server`; `plays` counts connections, `requests` is what a play noted."""

    url: str = ""
    plays: int = 0
    requests: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def raw_server(play: Play, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    """Every connection to it is given to `play`, on a free loopback port."""
    server = RawServer()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        server.plays += 1
        try:
            await play(Peer(server.plays, reader, writer))
            if writer.can_write_eof():
                writer.write_eof()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has left, or the test is over
        finally:
            tasks.discard(task)
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    server.url = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    try:
        yield server
    finally:
        listener.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answering(*answers: bytes) -> Play:
    """Answers the requests of each connection in turn, then closes it."""

    async def play(peer: Peer) -> None:
        for answer in answers:
            await peer.request()
            await peer.say(answer)

    return play
