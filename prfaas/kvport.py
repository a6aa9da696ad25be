"""Agent side of KvPort: one engine at a time, control over a unix socket, KV bytes in anonymous
shared memory.

The segments are memfds handed over with SCM_RIGHTS: they have no name, so nothing is left behind
when a process is killed, and a new connection gets new ones, so a late write never reaches another
engine's bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from prfaas.errors import ConfigError, EngineUnavailable
from prfaas_connect.port.layout import KvLayout, LayoutError
from prfaas_connect.port.messages import (
    PORT_VERSION,
    PREFIX,
    Hello,
    PortError,
    PortMessage,
    Refused,
    Welcome,
    decode,
    encode,
    sizes,
)

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MESSAGE_BYTES_ESTIMATE = 512
"""A queued message counts as so many bytes against the bound on the send buffer."""


class PortClosed(EngineUnavailable):
    """The engine's connection is gone."""

    kind = "engine_disconnected"


class EngineConn:
    """One connected engine: Hello, messages, shared memory. Closed by the PortServer."""

    def __init__(
        self,
        hello: Hello,
        layout: KvLayout,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ring: mmap.mmap,
        staging: mmap.mmap,
        max_queue: int,
    ) -> None:
        self.hello = hello
        self.layout = layout
        self.ring = memoryview(ring)
        self.staging = memoryview(staging)
        self._reader = reader
        self._writer = writer
        self._max_buffer = max_queue * MESSAGE_BYTES_ESTIMATE
        self.closed = False

    def __repr__(self) -> str:
        state = "CLOSED" if self.closed else "OPEN"
        return f"<EngineConn {self.hello.engine!r} {state}>"

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
            while True:
                header_bytes, blob_bytes = sizes(await self._reader.readexactly(PREFIX.size))
                header = await self._reader.readexactly(header_bytes)
                blob = await self._reader.readexactly(blob_bytes) if blob_bytes else b""
                yield decode(header), blob
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except PortError as exc:
            log.warning("kvport: engine %s broke the protocol: %s", self.hello.engine, exc)
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


class PortServer:
    """Listens at `path` for one engine at a time and runs `on_engine` for its life; `close` ends
    both.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        agent_name: str,
        ring_bytes: int,
        staging_bytes: int,
        verify_import: bool = False,
        max_queue: int = 4096,
        on_engine: Callable[[EngineConn], Awaitable[None]],
    ) -> None:
        self._path = Path(path)
        self._agent_name = agent_name
        self._ring_bytes = ring_bytes
        self._staging_bytes = staging_bytes
        self._verify_import = verify_import
        self._max_queue = max_queue
        self._on_engine = on_engine
        self._current: EngineConn | None = None
        self._sock: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind and listen. Raises ConfigError when another process listens at the path."""
        self._remove_stale()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        old_umask = os.umask(0o177)
        try:
            sock.bind(str(self._path))
        except OSError as exc:
            sock.close()
            raise ConfigError(f"cannot bind KvPort socket {self._path}: {exc.strerror}") from exc
        finally:
            os.umask(old_umask)
        sock.listen(8)
        self._sock = sock
        self._spawn(self._accept_loop(sock))

    async def close(self) -> None:
        """Stop listening, cut the engine, wait for `on_engine` to end, remove the socket."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
            self._path.unlink(missing_ok=True)
        if self._current is not None:
            self._current.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _remove_stale(self) -> None:
        if not self._path.exists():
            return
        if not self._path.is_socket():
            raise ConfigError(f"{self._path} exists and is not a socket")
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink(missing_ok=True)
                return
            except OSError as exc:
                raise ConfigError(f"{self._path} is not a usable socket: {exc.strerror}") from exc
        raise ConfigError(f"another agent already listens at {self._path}")

    def _spawn(self, coro: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_loop(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(sock)
            except OSError:
                return
            client.setblocking(False)
            self._spawn(self._serve(client))

    async def _serve(self, client: socket.socket) -> None:
        try:
            conn = await asyncio.wait_for(self._handshake(client), HANDSHAKE_TIMEOUT_S)
        except (PortError, LayoutError, OSError, TimeoutError) as exc:
            log.warning("kvport: refused an engine: %s", exc or type(exc).__name__)
            with contextlib.suppress(OSError):
                client.send(encode(Refused(str(exc) or type(exc).__name__)))
            client.close()
            return
        except BaseException:
            client.close()
            raise
        self._current = conn
        try:
            await self._on_engine(conn)
        except PortClosed as exc:
            log.info("kvport: %s", exc)
        finally:
            conn.close()
            if self._current is conn:
                self._current = None
            await conn.wait_closed()

    async def _handshake(self, client: socket.socket) -> EngineConn:
        _require_same_user(client)
        if self._current is not None and not self._current.closed:
            raise PortError("another engine is connected")
        header_bytes, blob_bytes = sizes(await _recv_exact(client, PREFIX.size))
        if blob_bytes:
            raise PortError("hello carries no blob")
        hello = decode(await _recv_exact(client, header_bytes))
        if not isinstance(hello, Hello):
            raise PortError(f"expected hello, not {hello.TYPE}")
        if hello.version != PORT_VERSION:
            raise PortError(f"engine speaks port version {hello.version}, not {PORT_VERSION}")
        layout = KvLayout.from_dict(hello.layout)
        _check_hello(hello, layout)
        ring_fd, ring = _shared_memory("prfaas-ring", self._ring_bytes)
        try:
            staging_fd, staging = _shared_memory("prfaas-staging", self._staging_bytes)
            try:
                welcome = Welcome(
                    PORT_VERSION,
                    self._agent_name,
                    self._ring_bytes,
                    self._staging_bytes,
                    self._verify_import,
                )
                # Fresh socket, some hundred bytes: the kernel takes them whole.
                data = encode(welcome)
                if socket.send_fds(client, [data], [ring_fd, staging_fd]) != len(data):
                    raise PortError("welcome was cut short")
            finally:
                os.close(staging_fd)
        finally:
            os.close(ring_fd)
        reader, writer = await asyncio.open_unix_connection(sock=client)
        return EngineConn(hello, layout, reader, writer, ring, staging, self._max_queue)


def _check_hello(hello: Hello, layout: KvLayout) -> None:
    if not hello.roles or set(hello.roles) - {"prefill", "decode"}:
        raise PortError(f"hello.roles {hello.roles} must be some of prefill, decode")
    for name in ("chunk_tokens", "block_tokens", "max_tokens", "vocab_size"):
        if getattr(hello, name) < 1:
            raise PortError(f"hello.{name} must be positive")
    heads = max(g.kv_heads for g in layout.groups)
    if not _cover(hello.ranks, heads):
        raise PortError(f"hello.ranks {hello.ranks} do not cover {heads} KV heads")


def _cover(ranks: list[list[int]], heads: int) -> bool:
    """Whether [low, high) ranges lie within `heads` and leave none out; they may overlap."""
    if any(len(rank) != 2 or not 0 <= rank[0] < rank[1] <= heads for rank in ranks):
        return False
    covered = 0
    for low, high in sorted(ranks):
        if low > covered:
            return False
        covered = max(covered, high)
    return covered == heads


def _require_same_user(client: socket.socket) -> None:
    cred = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", cred)
    if uid not in (os.getuid(), 0):
        raise PortError(f"user {uid} may not connect to this agent")


async def _recv_exact(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    parts: list[bytes] = []
    while count:
        part = await loop.sock_recv(sock, count)
        if not part:
            raise PortError("engine closed during the handshake")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _shared_memory(name: str, nbytes: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
