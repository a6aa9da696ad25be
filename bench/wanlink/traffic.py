"""Real TCP for measuring a link: a sink, a source and a ping, run inside its namespaces.

`sink ADDRESS` prints its port; `source ADDRESS PORT CONNECTIONS` sends to it all it can. Both go on
until their standard input ends, then print what they saw as JSON. `ping ADDRESS PORT COUNT` prints
round-trip seconds.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import sys
import time

from bench.wanlink import tcp

_CHUNK_BYTES = 1 << 20
_SAMPLE_S = 0.005
_PING, _BULK = b"p", b"d"
_PINGS_APART_S = 0.01
_TOTAL_RETRANS_AT = 100  # struct tcp_info, linux/tcp.h
_STDIN = 0


class _Samples:
    """Bytes received so far, at times of the monotonic clock not much closer than `_SAMPLE_S`."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int]] = [(time.monotonic(), 0)]

    def add(self, size: int) -> None:
        now, total = time.monotonic(), self.points[-1][1] + size
        if now - self.points[-1][0] > _SAMPLE_S:
            self.points.append((now, self.points[-1][1]))  # nothing came in between
        if len(self.points) > 1 and self.points[-1][0] - self.points[-2][0] < _SAMPLE_S:
            self.points.pop()
        self.points.append((now, total))


def sink(address: str) -> None:
    """Receive, echo pings, and print `[[monotonic_s, total_bytes], ...]`."""
    samples = _Samples()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with selectors.DefaultSelector() as selector, socket.create_server((address, 0)) as server:
        selector.register(_STDIN, selectors.EVENT_READ)
        selector.register(server, selectors.EVENT_READ)
        print(server.getsockname()[1], flush=True)
        while True:
            for key, _ in selector.select():
                peer = key.fileobj
                if peer is server:
                    connection = server.accept()[0]
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(connection, selectors.EVENT_READ)
                elif isinstance(peer, int):
                    print(json.dumps(samples.points), flush=True)
                    return
                elif isinstance(peer, socket.socket):
                    try:
                        size = peer.recv_into(buffer)
                    except ConnectionError:
                        size = 0
                    if size == 0:
                        selector.unregister(peer)
                        peer.close()
                    elif size == 1 and buffer[:1] == _PING:
                        peer.send(_PING)
                    else:
                        samples.add(size)


def source(address: str, port: int, connections: int) -> None:
    """Send on all connections, and print what TCP says about them."""
    chunk = memoryview(bytes(_BULK * _CHUNK_BYTES))
    sockets = [socket.create_connection((address, port), timeout=10) for _ in range(connections)]
    with selectors.DefaultSelector() as selector:
        selector.register(_STDIN, selectors.EVENT_READ)
        for sock in sockets:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_WRITE)
        while True:
            for key, _ in selector.select():
                if not isinstance(key.fileobj, socket.socket):
                    print(json.dumps(_tcp_report(sockets)), flush=True)
                    os._exit(0)  # what is still in the send buffers is of no use
                try:
                    key.fileobj.send(chunk)
                except BlockingIOError:
                    continue


def ping(address: str, port: int, count: int) -> None:
    """One byte there and back, `count` times."""
    rtts_s = []
    with socket.create_connection((address, port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            began = time.monotonic()
            sock.send(_PING)
            if not sock.recv(1):
                raise ConnectionError("the sink closed")
            rtts_s.append(time.monotonic() - began)
            time.sleep(_PINGS_APART_S)
    print(json.dumps(rtts_s), flush=True)


def _tcp_report(sockets: list[socket.socket]) -> dict[str, object]:
    size = _TOTAL_RETRANS_AT + 4
    infos = [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size) for sock in sockets]
    return {
        "congestion_control": sorted({tcp.congestion_control(sock) for sock in sockets}),
        "retransmits": sum(struct.unpack_from("=I", i, _TOTAL_RETRANS_AT)[0] for i in infos),
    }


def main(argv: list[str]) -> None:
    match argv:
        case ["sink", address]:
            sink(address)
        case ["source", address, port, connections]:
            source(address, int(port), int(connections))
        case ["ping", address, port, count]:
            ping(address, int(port), int(count))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
