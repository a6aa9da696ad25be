"""An engine that costs next to nothing: `python -m bench.gateway_engine` prints its port.

A body with `"stream": true` gets 32 events, one write each; with `"user": "paced"` one event every
10 ms. Any other request gets one JSON answer, so that every router finds what it asks a worker for.
"""

from __future__ import annotations

import asyncio
import json
from typing import cast

import httptools
import uvloop

EVENTS = 32
PACE_S = 0.01

_CHUNK = {
    "id": "cmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "bench",
    "choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None}],
}  # fmt: skip
_WHOLE = {
    "id": "cmpl-0", "object": "chat.completion", "created": 0, "model": "bench",
    "model_path": "bench", "is_generation": True, "status": "ok",
    "data": [{"id": "bench", "object": "model"}],
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"},
                 "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11},
}  # fmt: skip


def _in_chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


_EVENT = _in_chunk(b"data: " + json.dumps(_CHUNK).encode() + b"\n\n")
_END = _in_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_BODY = json.dumps(_WHOLE).encode()
_ANSWER = (
    f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(_BODY)}\r\n\r\n"
).encode() + _BODY


class Engine(asyncio.Protocol):
    """One connection of a router."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        self._body.clear()
        compact = body[:400].replace(b" ", b"") + body[-400:].replace(b" ", b"")
        if b'"stream":true' not in compact:
            self._write(_ANSWER)
            return
        self._write(_STREAM_HEAD)
        self._next(EVENTS, PACE_S if b'"user":"paced"' in compact else 0.0)

    def _next(self, left: int, pace_s: float) -> None:
        if self._transport is None:
            return
        if not left:
            self._write(_END)
            return
        self._write(_EVENT)
        if pace_s:
            self._loop.call_later(pace_s, self._next, left - 1, pace_s)
        else:
            self._loop.call_soon(self._next, left - 1, pace_s)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def _main() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_main())
