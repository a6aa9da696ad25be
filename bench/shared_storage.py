"""Shared storage between two sites: whatever lies in a directory is copied over a link at once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prfaas.errors import ProtocolError

_READ_BYTES = 1 << 20
_COPY_TIMEOUT_S = 300.0
_END = b"\n"


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[int]:
    """Serve `root` on a loopback port, which is returned: each connection gets all its files."""
    copies: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        copies.add(task)
        try:
            await _send_all(root, writer)
        except ConnectionError:
            pass  # Who asked has left, and says why.
        finally:
            copies.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tuple(copies):
            task.cancel()
        await server.wait_closed()


async def _send_all(root: Path, writer: asyncio.StreamWriter) -> None:
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        writer.write(f"{path.stat().st_size} {name}\n".encode())
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                writer.write(data)
                await writer.drain()
    writer.write(_END)
    await writer.drain()


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


async def copy_all(port: int, target: Path) -> int:
    """Copy everything from `port` into `target`; bytes of all files.

    Raises ProtocolError when the copy is cut short, TimeoutError when it takes minutes.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4 * _READ_BYTES)
    copied = 0
    try:
        async with asyncio.timeout(_COPY_TIMEOUT_S):
            while (line := await reader.readline()) != _END:
                size, _, name = line.decode().rstrip("\n").partition(" ")
                if not name:
                    raise ProtocolError("the copy of shared storage was cut short")
                copied += await _receive(reader, int(size), target / name)
    finally:
        writer.close()
    return copied


async def _receive(reader: asyncio.StreamReader, size: int, path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    left = size
    with path.open("wb") as file:
        while left:
            data = await reader.read(min(left, _READ_BYTES))
            if not data:
                raise ProtocolError("the copy of shared storage was cut short")
            file.write(data)
            left -= len(data)
    return size


def clear(root: Path) -> None:
    """Remove everything in `root`."""
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
