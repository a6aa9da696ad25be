from __future__ import annotations

import asyncio
import json

import pytest

from local_engine.requests import TokenEvent

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "tiny", "prompt": "hi"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_exception_is_a_500_that_tells_nothing(server, stream, caplog) -> None:
    server.core.script = [TokenEvent(("not a token",))]
    status, body, _ = await server.post(CHAT, {**HI, "stream": stream})
    assert status == 500
    assert body["error"]["type"] == "internal_error"
    assert "not a token" not in json.dumps(body)
    assert "failed" in caplog.text
    await server.core.wait_idle()


@pytest.mark.parametrize(
    ("sent", "kept"), [("trace-1:a/b", True), ("bad id", False), ("x" * 200, False), ("", False)]
)
async def test_a_sane_request_id_is_kept_and_always_echoed(server, says, sent, kept) -> None:
    server.core.script = says("ok")
    _, answer, headers = await server.post(CHAT, HI, headers={"X-Request-Id": sent})
    echoed = headers["X-Request-Id"]
    assert (echoed == sent) is kept
    assert echoed
    assert answer["id"] == f"chatcmpl-{echoed}"
    _, _, headers = await server.post(CHAT, {}, headers={"X-Request-Id": sent})
    assert (headers["X-Request-Id"] == sent) is kept


async def test_an_unknown_model_is_a_404_model_not_found(server) -> None:
    for path, body in ((CHAT, HI), (TEXT, PROMPT), ("/tokenize", PROMPT)):
        status, answer, _ = await server.post(path, {**body, "model": "other"})
        assert status == 404
        assert answer["error"]["code"] == "model_not_found"
        assert answer["error"]["param"] == "model"
        assert "`other`" in answer["error"]["message"]


async def test_unknown_paths_and_methods_are_errors_in_openai_shape(server) -> None:
    status, answer, _ = await server.post("/v1/nothing", {})
    assert (status, answer["error"]["type"]) == (404, "not_found")
    status, answer, headers = await server.get(CHAT)
    assert (status, answer["error"]["type"]) == (405, "not_found")
    assert headers["Allow"] == "POST"


@pytest.mark.parametrize(
    "noise",
    [
        b"\x00\xff" * 50 + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
    ids=lambda noise: repr(noise[:30]),
)
async def test_noise_is_refused_and_the_server_goes_on(server, noise) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(noise)
    status = await asyncio.wait_for(reader.read(100), 5)
    assert status == b"" or status.split()[1] in {b"400", b"413", b"404", b"405"}
    writer.close()
    assert (await server.get("/health"))[0] == 200
