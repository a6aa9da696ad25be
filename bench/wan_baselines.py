"""What KV over a WAN is measured against: blocking TCP sockets, and gRPC as everybody writes it.

Both ends are processes: `raw-server ADDRESS` and `grpc-server ADDRESS` print their port;
`raw-client ADDRESS PORT` and `grpc-client ADDRESS PORT` take one JSON object a line on standard
input, `{"nbytes": N, "connections": C, "fresh": false}`, and answer with a `Fetched`.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import grpc
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
        method = grpc.unary_stream_rpc_method_handler(
            self._fetch, BytesValue.FromString, BytesValue.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler("bench.Plain", {"Fetch": method})
        self._server.add_generic_rpc_handlers((handler,))
        self.port: int = self._server.add_insecure_port(f"{address}:0")

    def run(self) -> None:
        self._server.start()
        self._server.wait_for_termination()

    def _fetch(self, request: BytesValue, context: object) -> Iterator[BytesValue]:
        left = int(request.value)
        while left:
            size = min(left, MESSAGE_BYTES)
            at = left % (_SOURCE_BYTES - MESSAGE_BYTES)
            yield BytesValue(value=self._source[at : at + size])
            left -= size


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
        for message in call(BytesValue(value=str(nbytes).encode()), timeout=120):
            received += len(message.value)
        elapsed_s = time.monotonic() - began
        if received != nbytes:
            raise ConnectionError(f"{received} of {nbytes} bytes came")
        return Fetched(elapsed_s, received, "")


def main(argv: list[str]) -> None:
    """Serve, or fetch what standard input asks for until it ends."""
    match argv:
        case ["raw-server" | "grpc-server" as kind, address]:
            server = _RawServer(address) if kind == "raw-server" else _PlainServer(address)
            print(server.port, flush=True)
            server.run()
        case ["raw-client" | "grpc-client" as kind, address, port]:
            make: Any = _RawClient if kind == "raw-client" else _PlainClient
            client = make(address, int(port))
            for line in sys.stdin:
                print(json.dumps(asdict(client.fetch(**json.loads(line)))), flush=True)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
