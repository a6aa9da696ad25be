"""Agent side of KvPort: one engine at a time, control over a unix socket, KV bytes in anonymous
shared memory. An engine of several processes connects once and then joins the others.

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
from collections.abc import Awaitable, Callable
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.port_conn import EngineConn, PortClosed, PortConn, RankConn, new_connection
from prfaas_connect.port.layout import KvLayout, LayoutError
from prfaas_connect.port.messages import (
    PORT_VERSION,
    PREFIX,
    Hello,
    Join,
    PortError,
    Refused,
    Welcome,
    decode,
    encode,
    sizes,
)

__all__ = ["EngineConn", "PortClosed", "PortServer", "RankConn"]

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
ACCEPT_PAUSE_S = 1.0
"""Where the process has no descriptor left, it tries again after so long."""


class PortServer:
    """Listens at `path` for one engine at a time and runs `on_engine` for its life, `on_rank` for
    that of each process that joins it (by default one that says nothing); `close` ends all.
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
        on_rank: Callable[[EngineConn, RankConn], Awaitable[None]] | None = None,
    ) -> None:
        self._path = Path(path)
        self._agent_name = agent_name
        self._ring_bytes = ring_bytes
        self._staging_bytes = staging_bytes
        self._verify_import = verify_import
        self._max_queue = max_queue
        self._on_engine = on_engine
        self._on_rank = on_rank or _silent
        self._current: EngineConn | None = None
        self._sock: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting: set[socket.socket] = set()
        """Accepted, and not yet a connection's."""

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
            # Too long a path has no errno: an address holds 107 bytes of it.
            reason = exc.strerror or f"{exc}, take one of at most 107 bytes"
            raise ConfigError(f"cannot bind KvPort socket {self._path}: {reason}") from exc
        finally:
            os.umask(old_umask)
        sock.listen(8)
        self._sock = sock
        self._listen(sock)

    async def close(self) -> None:
        """Stop listening, cut the engine, wait for `on_engine` to end, remove the socket."""
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None
            self._path.unlink(missing_ok=True)
        if self._current is not None:
            self._current.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._greeting:  # of tasks that were cancelled before they began
            client.close()
        self._greeting.clear()

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

    def _accept(self, sock: socket.socket) -> None:
        """A client is there. Not awaited: a cancelled accept would lose it."""
        try:
            client, _ = sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as exc:
            log.warning("kvport: cannot accept: %s", exc.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(sock)
            loop.call_later(ACCEPT_PAUSE_S, self._listen, sock)
            return
        client.setblocking(False)
        self._greeting.add(client)
        self._spawn(self._serve(client))

    def _listen(self, sock: socket.socket) -> None:
        if self._sock is sock:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

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
        finally:
            self._greeting.discard(client)
        if isinstance(conn, EngineConn):
            await self._run_engine(conn)
        elif isinstance(conn, RankConn):
            await self._run_rank(conn)

    async def _run_engine(self, conn: EngineConn) -> None:
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

    async def _run_rank(self, rank: RankConn) -> None:
        engine = self._current
        if engine is None or engine.closed:  # it left while the answer was written
            rank.close()
            return
        engine.ranks[rank.rank] = rank
        try:
            await self._on_rank(engine, rank)
        except PortClosed as exc:
            log.info("kvport: %s", exc)
        finally:
            rank.close()
            if engine.ranks.get(rank.rank) is rank:
                del engine.ranks[rank.rank]
            await rank.wait_closed()

    async def _handshake(self, client: socket.socket) -> PortConn:
        _require_same_user(client)
        header_bytes, blob_bytes = sizes(await _recv_exact(client, PREFIX.size))
        if blob_bytes:
            raise PortError("hello carries no blob")
        first = decode(await _recv_exact(client, header_bytes))
        if isinstance(first, Join):
            return await self._join(client, first)
        if not isinstance(first, Hello):
            raise PortError(f"expected hello, not {first.TYPE}")
        if self._current is not None and not self._current.closed:
            raise PortError("another engine is connected")
        return await self._welcome(client, first)

    async def _welcome(self, client: socket.socket, hello: Hello) -> EngineConn:
        _check_version(hello.version)
        layout = KvLayout.from_dict(hello.layout)
        _check_hello(hello, layout)
        connection = new_connection()
        staging_fd, staging = _shared_memory("prfaas-staging", self._staging_bytes)
        try:
            ring = self._answer(client, connection, staging_fd)
            reader, writer = await asyncio.open_unix_connection(sock=client)
        except BaseException:
            os.close(staging_fd)
            raise
        return EngineConn(
            hello, layout, connection, reader, writer, ring, staging, staging_fd, self._max_queue
        )

    async def _join(self, client: socket.socket, join: Join) -> RankConn:
        _check_version(join.version)
        engine = self._current
        if engine is None or engine.closed or engine.connection != join.connection:
            raise PortError("no such engine is connected")
        if not 0 <= join.rank < len(engine.hello.ranks):
            raise PortError(f"join.rank {join.rank} is not one of {len(engine.hello.ranks)}")
        if join.rank in engine.ranks:
            raise PortError(f"rank {join.rank} has joined already")
        ring = self._answer(client, join.connection, engine.staging_fd)
        reader, writer = await asyncio.open_unix_connection(sock=client)
        return RankConn(
            f"{engine.name} rank {join.rank}", join.rank, reader, writer, ring, self._max_queue
        )

    def _answer(self, client: socket.socket, connection: str, staging_fd: int) -> mmap.mmap:
        """Send Welcome with both descriptors; the new ring."""
        ring_fd, ring = _shared_memory("prfaas-ring", self._ring_bytes)
        try:
            welcome = Welcome(
                PORT_VERSION,
                self._agent_name,
                self._ring_bytes,
                self._staging_bytes,
                self._verify_import,
                connection,
            )
            # Fresh socket, some hundred bytes: the kernel takes them whole.
            data = encode(welcome)
            if socket.send_fds(client, [data], [ring_fd, staging_fd]) != len(data):
                raise PortError("welcome was cut short")
        finally:
            os.close(ring_fd)
        return ring


async def _silent(engine: EngineConn, rank: RankConn) -> None:
    """Serve a rank that only reads."""
    async for message, _ in rank:
        log.warning("kvport: %s sent %s, which is not expected", rank, message.TYPE)
        return


def _check_version(version: int) -> None:
    if version != PORT_VERSION:
        raise PortError(f"engine speaks port version {version}, not {PORT_VERSION}")


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
