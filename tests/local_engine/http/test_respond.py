from __future__ import annotations

import json
import socket

import pytest

from local_engine.requests import FinishReason, TokenEvent
from prfaas.errors import EngineUnavailable, Overloaded, PrefillUnavailable

CHAT = "/v1/chat/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("full", retry_after_s=2.2), 503),
        (PrefillUnavailable("no peer"), 503),
        (EngineUnavailable("gone"), 503),
        (PrefillUnavailable("no peer", retry_after_s=7), 503),
    ],
    ids=["overloaded", "prefill", "engine", "prefill-7"],
)
@pytest.mark.parametrize("when", ["submit", "event"])
async def test_a_failure_before_the_first_token_has_its_true_status(
    server, stream, error, status, when
) -> None:
    if when == "submit":
        server.core.refuse = error
    else:
        server.core.script = [TokenEvent((), error=error)]
    got, body, headers = await server.post(CHAT, {**HI, "stream": stream})
    assert got == status
    assert body["error"]["type"] == error.kind
    assert body["error"]["message"] == error.message
    assert headers["Content-Type"] == "application/json"
    expected = {2.2: "3", 7: "7", None: "1"}[error.retry_after_s]
    assert headers["Retry-After"] == expected
    await server.core.wait_idle()


async def test_a_failure_after_the_first_token_is_an_event_and_no_done(server) -> None:
    error = EngineUnavailable("the engine broke")
    server.core.script = [TokenEvent(tuple(b"a")), TokenEvent((), error=error)]
    events = await server.stream(CHAT, HI)
    assert json.loads(events[-1])["error"]["message"] == "the engine broke"
    assert b"[DONE]" not in events
    await server.core.wait_idle()


async def test_an_engine_that_falls_silent_is_an_error_not_a_short_answer(server) -> None:
    server.core.script = [TokenEvent(tuple(b"a"))]
    events = await server.stream(CHAT, HI)
    assert json.loads(events[-1])["error"]["type"] == "engine_unavailable"
    status, body, _ = await server.post(CHAT, HI)
    assert (status, body["error"]["type"]) == (503, "engine_unavailable")


async def test_an_unexpected_exception_in_a_stream_is_an_error_event(server, caplog) -> None:
    server.core.script = [TokenEvent(tuple(b"a")), TokenEvent(("x",))]
    events = await server.stream(CHAT, HI)
    assert json.loads(events[-1])["error"]["type"] == "internal_error"
    assert "stream failed" in caplog.text


async def test_a_client_that_reads_nothing_is_dropped_and_others_are_not_slowed(serve) -> None:
    async with serve(slow_client_timeout_s=0.2, send_buffer_bytes=4096) as server:
        server.core.script = [TokenEvent(tuple(b"x" * 20_000)) for _ in range(40)]
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            body = json.dumps({**HI, "stream": True}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            await server.core.submitted.wait()
            server.core.script = [TokenEvent((258,), finish_reason=FinishReason.STOP)]
            status, _, _ = await server.post(CHAT, HI)
            assert status == 200
            assert not server.core.streams[0].closed
            await server.core.wait_idle()
        assert server.core.streams[0]._script, "events beyond the buffers must not be taken"


async def test_tokens_leave_without_delay(server) -> None:
    """Small writes must not wait for acknowledgements (Nagle)."""
    server.core.script = [TokenEvent((258,), finish_reason=FinishReason.STOP)]
    await server.stream(CHAT, HI)
    assert server.sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
