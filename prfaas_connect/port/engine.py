"""Engine side of KvPort: threads and blocking sockets, so that it lives in any engine's process.

The reader thread connects, reconnects and hands every message to the handler. `send` writes at
once from the calling thread where the socket takes it; what does not fit is queued and written by
a second thread, so the engine never waits for its agent.
"""

from __future__ import annotations

import array
import contextlib
import logging
import mmap
import os
import socket
import threading
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prfaas_connect.port.messages import (
    PORT_VERSION,
    PREFIX,
    Hello,
    Join,
    PortError,
    PortMessage,
    Refused,
    RingFree,
    Welcome,
    decode,
    encode,
    sizes,
)
from prfaas_connect.port.ring import RingAllocator

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MAX_PAUSE_S = 1.0
"""Between two tries, where the agent refuses."""


class EngineHandler(Protocol):
    """What an engine does with its port's events; called on the reader thread, must return fast."""

    def on_connected(self, welcome: Welcome) -> None: ...

    def on_disconnected(self, reason: str) -> None: ...

    def on_message(self, message: PortMessage, blob: bytes) -> None: ...


class _NotTaken(PortError):
    """The agent is there and refuses."""


class _Connection:
    """One connection to an agent: socket, shared memory, ring. Dropped as a whole."""

    def __init__(
        self, sock: socket.socket, welcome: Welcome, ring: mmap.mmap, staging: mmap.mmap
    ) -> None:
        self.sock = sock
        self.welcome = welcome
        self.ring_memory = np.frombuffer(ring, dtype=np.uint8)
        self.staging_memory = np.frombuffer(staging, dtype=np.uint8)
        self.ring = RingAllocator(welcome.ring_bytes)
        self.backlog: deque[memoryview] = deque()
        self.open = True


class EnginePort:
    """Owns the connection to the agent at `path`, its two threads and its shared memory.

    `hello` introduces an engine, or joins a rank of one that runs in several processes. It gives
    up once the agent has refused it `max_refusals` times in a row.

    `close` ends all of them. After a disconnect every session is void: the handler is told, and a
    new connection brings new shared memory, so late reads of the old one never see another
    session's bytes.
    """

    def __init__(
        self,
        path: str,
        hello: Hello | Join,
        handler: EngineHandler,
        *,
        reconnect_s: float = 0.5,
        max_refusals: int | None = None,
        max_queue: int = 4096,
    ) -> None:
        self._path = path
        self._hello = hello
        self._handler = handler
        self._reconnect_s = reconnect_s
        self._max_refusals = max_refusals
        self._max_queue = max_queue
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._backlogged = threading.Condition(self._lock)
        self._conn: _Connection | None = None
        self._told = ""
        """Why there is no connection, as the log has it."""
        self._reader = threading.Thread(target=self._read_loop, name="kvport-reader", daemon=True)
        self._writer = threading.Thread(target=self._write_loop, name="kvport-writer", daemon=True)

    def start(self) -> None:
        """Start connecting; returns at once."""
        self._reader.start()
        self._writer.start()

    def close(self) -> None:
        """Disconnect and end both threads. Idempotent."""
        self._stop.set()
        with self._lock:
            if self._conn is not None:
                self._shut(self._conn)
            self._backlogged.notify_all()
        for thread in (self._reader, self._writer):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(HANDSHAKE_TIMEOUT_S)

    @property
    def connected(self) -> bool:
        return self._conn is not None

    @property
    def welcome(self) -> Welcome | None:
        conn = self._conn
        return conn.welcome if conn else None

    @property
    def ring_bytes(self) -> int:
        conn = self._conn
        return conn.welcome.ring_bytes if conn else 0

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> bool:
        """Send without waiting. False: not connected (or cut because the agent stopped reading)."""
        data = memoryview(encode(message, blob))
        with self._lock:
            conn = self._conn
            if conn is None or not conn.open:
                return False
            if not conn.backlog:
                data = self._send_now(conn, data)
            if len(data):
                if len(conn.backlog) >= self._max_queue:
                    self._shut(conn)
                    return False
                conn.backlog.append(data)
                self._backlogged.notify()
            return conn.open

    def ring_reserve(self, nbytes: int) -> int | None:
        """Offset of a contiguous ring region, or None (no room now, or not connected).

        Each reserved region must be followed by exactly one Record, in the order reserved.
        """
        conn = self._conn
        return conn.ring.reserve(nbytes) if conn else None

    def ring(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Writable view of a reserved region. PortError: disconnected, out of bounds."""
        conn = self._require()
        return _view(conn.ring_memory, offset, nbytes)

    def staging(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """View of staged bytes. Raises PortError when disconnected or out of bounds."""
        conn = self._require()
        return _view(conn.staging_memory, offset, nbytes)

    def _require(self) -> _Connection:
        conn = self._conn
        if conn is None:
            raise PortError("not connected to an agent")
        return conn

    def _read_loop(self) -> None:
        refusals = 0
        while not self._stop.is_set():
            try:
                conn = self._connect()
            except (OSError, PortError) as exc:
                self._tell(str(exc) or type(exc).__name__)
                refusals = refusals + 1 if isinstance(exc, _NotTaken) else 0
                if refusals == self._max_refusals:
                    return
                pause_s = self._reconnect_s * 2 ** min(refusals, 5)
                self._stop.wait(min(pause_s, max(MAX_PAUSE_S, self._reconnect_s)))
                continue
            reason, self._told, refusals = "closed", "", 0
            with self._lock:
                self._conn = conn
                if self._stop.is_set():  # close() came while we were connecting
                    self._shut(conn)
            try:
                self._handler.on_connected(conn.welcome)
                self._read_messages(conn)
            except (OSError, PortError, ValueError) as exc:
                reason = str(exc) or type(exc).__name__
            finally:
                with self._lock:
                    self._shut(conn)
                    self._conn = None
                conn.sock.close()
                self._handler.on_disconnected(reason)
            self._stop.wait(self._reconnect_s)

    def _tell(self, reason: str) -> None:
        """Each reason once. Ranks come and go with their engine, which tells for them."""
        if reason != self._told and isinstance(self._hello, Hello):
            log.warning("no agent at %s: %s", self._path, reason)
        self._told = reason

    def _connect(self) -> _Connection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fds: list[int] = []
        try:
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            sock.connect(self._path)
            sock.sendall(encode(self._hello))
            first, fds = _recv_with_fds(sock)
            header_bytes, blob_bytes = sizes(first)
            message = decode(_recv_exact(sock, header_bytes))
            _recv_exact(sock, blob_bytes)
            if isinstance(message, Refused):
                raise _NotTaken(f"agent refused: {message.message}")
            if not isinstance(message, Welcome) or len(fds) != 2:
                raise PortError("expected Welcome with two descriptors")
            if message.version != PORT_VERSION:
                raise PortError(f"agent speaks port version {message.version}, not {PORT_VERSION}")
            ring, staging = _map(fds[0], message.ring_bytes), _map(fds[1], message.staging_bytes)
            sock.settimeout(None)
            return _Connection(sock, message, ring, staging)
        except BaseException:
            sock.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def _read_messages(self, conn: _Connection) -> None:
        stream = conn.sock.makefile("rb", buffering=1 << 16)
        with contextlib.closing(stream):
            while True:
                prefix = stream.read(PREFIX.size)
                if not prefix:
                    return
                if len(prefix) < PREFIX.size:
                    raise PortError("agent closed in the middle of a message")
                header_bytes, blob_bytes = sizes(prefix)
                header, blob = stream.read(header_bytes), stream.read(blob_bytes)
                if len(header) < header_bytes or len(blob) < blob_bytes:
                    raise PortError("agent closed in the middle of a message")
                message = decode(header)
                if isinstance(message, RingFree):
                    conn.ring.free(message.count)
                self._handler.on_message(message, blob)

    def _write_loop(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                conn = self._conn
                if conn is None or not conn.open or not conn.backlog:
                    self._backlogged.wait(timeout=self._reconnect_s)
                    continue
                data = conn.backlog[0]
            # Outside the lock: the engine's `send` appends meanwhile. Only this thread pops.
            try:
                sent = conn.sock.send(data)
            except OSError:
                with self._lock:
                    self._shut(conn)
                continue
            with self._lock:
                if sent == len(data):
                    conn.backlog.popleft()
                else:
                    conn.backlog[0] = data[sent:]

    def _send_now(self, conn: _Connection, data: memoryview) -> memoryview:
        try:
            while len(data):
                data = data[conn.sock.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError:
            self._shut(conn)
            return data[:0]
        return data

    def _shut(self, conn: _Connection) -> None:
        """Make both threads leave `conn`; the reader closes the descriptor. Lock held."""
        conn.open = False
        conn.backlog.clear()
        with contextlib.suppress(OSError):
            conn.sock.shutdown(socket.SHUT_RDWR)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    """Shared memory of exactly this size. Raises PortError where the descriptor has less."""
    if nbytes < 1:
        raise PortError(f"shared memory of {nbytes} bytes")
    try:
        return mmap.mmap(fd, nbytes)
    except (ValueError, OverflowError) as exc:
        raise PortError(f"shared memory: {exc}") from exc


def _view(memory: npt.NDArray[np.uint8], offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    if offset < 0 or nbytes < 0 or offset + nbytes > len(memory):
        raise PortError(f"[{offset}, {offset + nbytes}) is outside shared memory of {len(memory)}")
    return memory[offset : offset + nbytes]


def _recv_exact(sock: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = sock.recv(count)
        if not part:
            raise PortError("agent closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _recv_with_fds(sock: socket.socket) -> tuple[bytes, list[int]]:
    """The message prefix and the descriptors that came with its first byte."""
    fds = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(PREFIX.size, socket.CMSG_SPACE(2 * fds.itemsize))
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    received = fds.tolist()
    try:
        return data + _recv_exact(sock, PREFIX.size - len(data)), received
    except BaseException:
        for fd in received:
            os.close(fd)
        raise
