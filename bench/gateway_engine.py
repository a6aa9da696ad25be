"""An engine that costs next to nothing: `python -m bench.gateway_engine` prints its port.

A body with `"stream": true` gets 32 events, one write each; with `"user": "paced"` one event every
10 ms. Any other request gets one JSON answer, so that every router finds what it asks a worker for.

It has a second port, for routers that want an engine for each leg. The agents of D and P run beside
it, and the line has their addresses after the ports: what they tell
makes every prompt worth offloading, and D's reports each transfer as staged, ten times a second.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from typing import cast

import httptools
import uvloop

from prfaas.snapshot import Outcome, PrefillCurve
from prfaas.telemetry import EngineInfo, LinkInfo, WatchUpdate
from prfaas.testing.scripted_agent import ScriptedAgent, scripted_agent

EVENTS = 32
PACE_S = 0.01
REPORT_S = 0.1
MODEL = "bench"
ENGINE, PEER, INSTANCE = "d-0", "p", "p-0"

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
    "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "bench"},
}  # fmt: skip


def _in_chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


_EVENT = _in_chunk(b"data: " + json.dumps(_CHUNK).encode() + b"\n\n")
_END = _in_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_TRANSFER = re.compile(rb'"transfer_id":"([^"]+)"')
_BODY = json.dumps(_WHOLE).encode()
_ANSWER = (
    f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(_BODY)}\r\n\r\n"
).encode() + _BODY


class Engine(asyncio.Protocol):
    """One connection of a router."""

    def __init__(self, transfers: list[str]) -> None:
        """`transfers` takes the id of each transfer that a request comes with."""
        self._transfers = transfers
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
        transfer = _TRANSFER.search(body, max(0, len(body) - 1000))
        if transfer is not None:
            self._transfers.append(transfer[1].decode())
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


_CURVE = PrefillCurve(base_s=0.01, token_s=0.002, token_context_s=0.0, chunk_tokens=256)


def _d_engine() -> EngineInfo:
    """Busy for seconds."""
    return EngineInfo(
        ENGINE, ready=True, queue_tokens=4000, waiting=4, running=2, decode_step_s=0.02,
        curve=_CURVE, model=MODEL, block_tokens=16, token_bytes=1000, epoch="d",
        free_staging_bytes=1 << 40, roles=("prefill", "decode"),
    )  # fmt: skip


def _p_engine() -> EngineInfo:
    """Idle."""
    return EngineInfo(
        INSTANCE, ready=True, curve=_CURVE, model=MODEL, block_tokens=16, token_bytes=1000,
        epoch="p", free_retention_bytes=1 << 40, roles=("prefill",),
    )  # fmt: skip


async def _report(d: ScriptedAgent, transfers: list[str]) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        if transfers:
            outcomes = tuple(Outcome(each, "staged", raw_bytes=1000) for each in transfers)
            d.push(WatchUpdate(0, False, outcomes=outcomes, started=tuple(transfers)))
            transfers.clear()


async def _main() -> None:
    transfers: list[str] = []
    link = LinkInfo(PEER, INSTANCE, ready=True, goodput_bytes_per_s=1e9, rtt_s=0.01)
    async with AsyncExitStack() as stack:
        d = await stack.enter_async_context(scripted_agent(_d_engine(), (link,)))
        p = await stack.enter_async_context(scripted_agent(_p_engine()))
        loop = asyncio.get_running_loop()
        ports: list[int] = []
        for _ in range(2):
            server = await loop.create_server(
                lambda: Engine(transfers), "127.0.0.1", 0, backlog=1024
            )
            ports.append(server.sockets[0].getsockname()[1])
        print(*ports, d.address, p.address, flush=True)
        await _report(d, transfers)


if __name__ == "__main__":
    uvloop.run(_main())
