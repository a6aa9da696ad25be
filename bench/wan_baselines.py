"""What KV over a WAN is measured against: blocking TCP sockets, and gRPC as everybody writes it,
with threads and with asyncio.

Both ends are processes: `KIND-server ADDRESS` prints its port, `KIND-client ADDRESS PORT` takes one
JSON object a line on standard input, `{"nbytes": N, "connections": C, "fresh": false}`, and answers
with a `Fetched`. KIND is `raw`, `grpc` or `aio`.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
import uvloop
from google.protobuf.wrappers_pb2 import BytesValue

from bench.wanlink.tcp import congestion_control

MESSAGE_BYTES = 1 << 20
"""Of the gRPC arm; also the buffer of the raw one."""
_SLICE_BYTES = 256 << 10
"""A connection takes the next one when its socket has taken the last: fast ones carry more."""
_ASK = struct.Struct("<QQI")
"""Transfer, its bytes, its connections."""
_SLICE = struct.Struct("<I")
_SOURCE_BYTES = 64 << 20
_METHOD = "/bench.Plain/Fetch"
_TIMEOUT_S = 120.0
_GRPC_OPTIONS = [
    ("grpc.max_receive_message_length", 2 * MESSAGE_BYTES),
    ("grpc.max_send_message_length", 2 * MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class Fetched:
    """One transfer as its receiver saw it."""

    elapsed_s: float
    """First request sent (with `fresh`: first connection begun) to the last byte received."""
    nbytes: int
    congestion_control: str
    """Of the receiver's socket; empty where it cannot be reached."""


class _Slices:
    """What is left of a transfer, taken by the threads of its connections."""

    def __init__(self, nbytes: int, connections: int) -> None:
        self._lock = threading.Lock()
        self._at = 0
        self._nbytes = nbytes
        self.connections = connections

    def take(self) -> tuple[int, int]:
        """(start, size) of the next slice; size 0: nothing is left."""
        with self._lock:
            start = self._at
            self._at = min(self._nbytes, start + _SLICE_BYTES)
            return start, self._at - start


class _RawServer:
    """Sends random bytes to whoever asks, one blocking thread for each connection."""

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0))
        self.port: int = self._server.getsockname()[1]
        self._source = memoryview(os.urandom(_SOURCE_BYTES))
        self._lock = threading.Lock()
        self._transfers: dict[int, _Slices] = {}

    def run(self) -> None:
        while True:
            connection, _ = self._server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while ask := _receive_exactly(connection, _ASK.size):
                transfer, nbytes, connections = _ASK.unpack(ask)
                with self._lock:
                    new = _Slices(nbytes, connections)
                    slices = self._transfers.setdefault(transfer, new)
                self._send(connection, slices)
                with self._lock:
                    slices.connections -= 1
                    if slices.connections == 0:
                        del self._transfers[transfer]

    def _send(self, connection: socket.socket, slices: _Slices) -> None:
        while True:
            start, size = slices.take()
            connection.sendall(_SLICE.pack(size))
            if size == 0:
                return
            at = start % (_SOURCE_BYTES - _SLICE_BYTES)
            connection.sendall(self._source[at : at + size])


class _RawClient:
    """Keeps its connections warm, a set for each number of them."""

    def __init__(self, address: str, port: int) -> None:
        self._target = (address, port)
        self._sets: dict[int, list[socket.socket]] = {}
        self._transfers = itertools.count(os.getpid() << 32)

    def fetch(self, nbytes: int, connections: int, fresh: bool) -> Fetched:
        if fresh:
            for sock in self._sets.pop(connections, []):
                sock.close()
        began = time.monotonic()
        if connections not in self._sets:
            self._sets[connections] = [self._connect() for _ in range(connections)]
        if not fresh:
            began = time.monotonic()
        ask = _ASK.pack(next(self._transfers), nbytes, connections)
        sockets = self._sets[connections]
        with ThreadPoolExecutor(connections) as threads:
            received = sum(threads.map(lambda sock: _take(sock, ask), sockets))
        elapsed_s = time.monotonic() - began
        if received != nbytes:
            raise ConnectionError(f"{received} of {nbytes} bytes came")
        return Fetched(elapsed_s, received, congestion_control(sockets[0]))

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._target, timeout=10)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def _take(sock: socket.socket, ask: bytes) -> int:
    """All slices of one connection; their bytes."""
    sock.sendall(ask)
    buffer = memoryview(bytearray(_SLICE_BYTES))
    total = 0
    while True:
        (left,) = _SLICE.unpack(_receive_exactly(sock, _SLICE.size))
        if left == 0:
            return total
        total += left
        while left:
            count = sock.recv_into(buffer[:left])
            if count == 0:
                raise ConnectionError("the server closed")
            left -= count


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes; empty where the other side has closed before the first."""
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            if data:
                raise ConnectionError("closed in the middle")
            return b""
        data += part
    return data


class _PlainServer:
    """A server-streaming RPC with the payload in a protobuf bytes field."""

    def __init__(self, address: str) -> None:
        self._source = os.urandom(_SOURCE_BYTES)
        self._server = grpc.server(ThreadPoolExecutor(4), options=_GRPC_OPTIONS)
        self._server.add_generic_rpc_handlers((_handler(self._fetch),))
        self.port: int = self._server.add_insecure_port(f"{address}:0")

    def run(self) -> None:
        self._server.start()
        self._server.wait_for_termination()

    def _fetch(self, request: BytesValue, context: object) -> Iterator[BytesValue]:
        yield from _messages(self._source, int(request.value))


class _PlainClient:
    """One channel, opened anew for each transfer that asks for it."""

    def __init__(self, address: str, port: int) -> None:
        self._target = f"{address}:{port}"
        self._channel: grpc.Channel | None = None

    def fetch(self, nbytes: int, connections: int, fresh: bool) -> Fetched:
        if connections != 1:
            raise ValueError("the plain arm has one channel")
        if fresh and self._channel is not None:
            self._channel.close()
            self._channel = None
        began = time.monotonic()
        if self._channel is None:
            self._channel = grpc.insecure_channel(self._target, options=_GRPC_OPTIONS)
        call = self._channel.unary_stream(
            _METHOD, BytesValue.SerializeToString, BytesValue.FromString
        )
        received = 0
        for message in call(_asking(nbytes), timeout=_TIMEOUT_S):
            received += len(message.value)
        return _fetched(began, nbytes, received)


class _AioServer:
    """The same with asyncio, on the event loop that ours runs on."""

    def __init__(self, address: str) -> None:
        self._source = os.urandom(_SOURCE_BYTES)
        self._loop = uvloop.new_event_loop()
        self._loop.run_until_complete(self._start(address))

    async def _start(self, address: str) -> None:
        self._server = grpc.aio.server(options=_GRPC_OPTIONS)
        self._server.add_generic_rpc_handlers((_handler(self._fetch),))
        self.port: int = self._server.add_insecure_port(f"{address}:0")
        await self._server.start()

    def run(self) -> None:
        self._loop.run_until_complete(self._server.wait_for_termination())

    async def _fetch(self, request: BytesValue, context: object) -> AsyncIterator[BytesValue]:
        for message in _messages(self._source, int(request.value)):
            yield message


class _AioClient:
    """The same with asyncio."""

    def __init__(self, address: str, port: int) -> None:
        self._target = f"{address}:{port}"
        self._loop = uvloop.new_event_loop()
        self._channel: grpc.aio.Channel | None = None

    def fetch(self, nbytes: int, connections: int, fresh: bool) -> Fetched:
        if connections != 1:
            raise ValueError("the plain arm has one channel")
        return self._loop.run_until_complete(self._fetch(nbytes, fresh))

    async def _fetch(self, nbytes: int, fresh: bool) -> Fetched:
        if fresh and self._channel is not None:
            await self._channel.close()
            self._channel = None
        began = time.monotonic()
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._target, options=_GRPC_OPTIONS)
        call = self._channel.unary_stream(
            _METHOD, BytesValue.SerializeToString, BytesValue.FromString
        )
        received = 0
        async for message in call(_asking(nbytes), timeout=_TIMEOUT_S):
            received += len(message.value)
        return _fetched(began, nbytes, received)


def _handler(fetch: Any) -> grpc.GenericRpcHandler:
    method = grpc.unary_stream_rpc_method_handler(
        fetch, BytesValue.FromString, BytesValue.SerializeToString
    )
    return grpc.method_handlers_generic_handler("bench.Plain", {"Fetch": method})


def _asking(nbytes: int) -> BytesValue:
    return BytesValue(value=str(nbytes).encode())


def _messages(source: bytes, nbytes: int) -> Iterator[BytesValue]:
    left = nbytes
    while left:
        size = min(left, MESSAGE_BYTES)
        at = left % (_SOURCE_BYTES - MESSAGE_BYTES)
        yield BytesValue(value=source[at : at + size])
        left -= size


def _fetched(began: float, nbytes: int, received: int) -> Fetched:
    elapsed_s = time.monotonic() - began
    if received != nbytes:
        raise ConnectionError(f"{received} of {nbytes} bytes came")
    return Fetched(elapsed_s, received, "")


class _Server(Protocol):
    port: int

    def run(self) -> None: ...


class _Client(Protocol):
    def fetch(self, nbytes: int, connections: int, fresh: bool) -> Fetched: ...


def _server(kind: str, address: str) -> _Server:
    match kind:
        case "raw":
            return _RawServer(address)
        case "grpc":
            return _PlainServer(address)
        case "aio":
            return _AioServer(address)
    raise SystemExit(__doc__)


def _client(kind: str, address: str, port: int) -> _Client:
    match kind:
        case "raw":
            return _RawClient(address, port)
        case "grpc":
            return _PlainClient(address, port)
        case "aio":
            return _AioClient(address, port)
    raise SystemExit(__doc__)


def main(argv: list[str]) -> None:
    """Serve, or fetch what standard input asks for until it ends."""
    match [part for word in argv[:1] for part in word.split("-")], argv[1:]:
        case [kind, "server"], [address]:
            server = _server(kind, address)
            print(server.port, flush=True)
            server.run()
        case [kind, "client"], [address, port]:
            client = _client(kind, address, int(port))
            for line in sys.stdin:
                print(json.dumps(asdict(client.fetch(**json.loads(line)))), flush=True)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
