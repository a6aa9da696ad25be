"""Whatever bytes a client sends the gateway's port: a right answer or a clean end, and no trace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway import app
from prfaas.testing.fuzz import mutate_bytes
from prfaas.testing.gateway_setup import MODEL, until
from prfaas.testing.scripted_engine import Script

PATH = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 4}).encode()
LIMIT_BYTES = 20_000
CLOSED = -1
"""In place of a status: an end without an answer."""


def head(method: str, path: str, *fields: str, version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"{method} {path} {version}", "host: x", *fields, "", ""]).encode("latin-1")


def get(path: str, *fields: str) -> bytes:
    return head("GET", path, *fields)


def post(*fields: str, path: str = PATH, body: bytes = BODY, version: str = "HTTP/1.1") -> bytes:
    return head("POST", path, *fields, f"content-length: {len(body)}", version=version) + body


def unsized(*fields: str, body: bytes = BODY) -> bytes:
    return head("POST", PATH, *fields) + body


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


def chunked(*chunks: bytes, fields: tuple[str, ...] = (), end: bytes = b"0\r\n\r\n") -> bytes:
    return head("POST", PATH, *fields, "transfer-encoding: chunked") + b"".join(chunks) + end


GOOD = post("x-request-id: good")
CUT = (chunk(BODY[:7], b";a=b"), chunk(BODY[7:], b';q="x y";z'))

CASES: dict[str, tuple[bytes, int]] = {
    # --- framing of bodies ---
    "chunks with extensions": (chunked(*CUT), 200),
    "chunks with trailers": (chunked(*CUT, end=b"0\r\nx-a: b\r\nauthorization: c\r\n\r\n"), 200),
    "both framings": (post("transfer-encoding: chunked"), 400),
    "both framings, the other first": (chunked(*CUT, fields=("content-length: 5",)), 400),
    "two codings": (chunked(*CUT, fields=("transfer-encoding: gzip",)), 400),
    "unknown coding": (unsized("transfer-encoding: xchunked"), 400),
    "identity coding": (unsized("transfer-encoding: identity"), 400),
    "chunk size of letters": (chunked(b"zz\r\n" + BODY), 400),
    "chunk size below zero": (chunked(b"-5\r\n" + BODY), 400),
    "chunk size over 64 bits": (chunked(b"f" * 17 + b"\r\n" + BODY), 400),
    "chunk size in C": (chunked(b"0x5\r\n" + BODY), 400),
    "chunk with bare line feeds": (chunked(b"%x\n%b\n" % (len(BODY), BODY)), 400),
    "chunk longer than it says": (chunked(b"5\r\n" + BODY + b"\r\n"), 400),
    "trailer too long": (chunked(*CUT, end=b"0\r\nx: " + b"y" * 9000 + b"\r\n\r\n"), 431),
    "too many trailers": (chunked(*CUT, end=b"0\r\n" + b"x: y\r\n" * 1000 + b"\r\n"), 400),
    "the same length twice": (post(f"content-length: {len(BODY)}"), 400),
    "two lengths": (post("content-length: 3"), 400),
    "list of lengths": (unsized(f"content-length: {len(BODY)}, {len(BODY)}"), 400),
    "signed length": (unsized(f"content-length: +{len(BODY)}"), 400),
    "length below zero": (unsized("content-length: -1"), 400),
    "no digits of a length": (unsized("content-length:"), 400),
    "length in hex": (unsized("content-length: 0x10"), 400),
    "length of 40 digits": (unsized("content-length: " + "9" * 40), 400),
    "length of 2**63": (unsized("content-length: 9223372036854775808"), 413),
    "body over the limit": (unsized(f"content-length: {LIMIT_BYTES + 1}"), 413),
    "body over the limit, not asked for": (
        head("POST", PATH, f"content-length: {LIMIT_BYTES + 1}", "expect: 100-continue"), 413,
    ),
    "body over the limit where none belongs": (
        get("/health", f"content-length: {LIMIT_BYTES + 1}"), 413,
    ),
    "chunks over the limit": (chunked(chunk(b" " * LIMIT_BYTES), chunk(BODY)), 413),
    "no body": (unsized(body=b""), 400),
    "empty body": (post(body=b""), 400),
    "body that is no gzip": (post("content-encoding: gzip"), 400),
    "body in an unknown coding": (post("content-encoding: foo"), 415),
    "body in another coding": (post("content-encoding: zstd"), 415),
    "unknown expectation": (post("expect: 200-ok"), 417),
    "unknown expectation where none belongs": (get("/health", "expect: 200-ok"), 417),
    # --- heads ---
    "folded line": (post("x-a: b\r\n c"), 400),
    "bare line feeds": (GOOD.replace(b"\r\n", b"\n"), 400),
    "bare line feed": (GOOD.replace(b"host: x\r\n", b"host: x\n"), 400),
    "bare carriage return": (post("x-a: b\rc"), 400),
    "zero byte": (post("x-a: b\0c"), 400),
    "control byte": (post("user-agent: b\x01c"), 400),
    "space before a colon": (post("x-a : b"), 400),
    "no colon": (post("x-a"), 400),
    "no name": (post(": b"), 400),
    "space before a name": (post(" x-a: b"), 400),
    "no host": (GOOD.replace(b"host: x\r\n", b""), 400),
    "two hosts": (post("host: y"), 400),
    "long line": (post("x-a: " + "y" * 9000), 431),
    "long line without an end": (b"POST /v1/completions HTTP/1.1\r\nx: " + b"y" * 9000, 431),
    "long target": (get("/" + "y" * 9000), 431),
    "1,000 lines": (post(*["x-a: bcdefg"] * 1000), 400),
    "1,000 lines without an end": (b"GET / HTTP/1.1\r\n" + b"xxxx: yyyy\r\n" * 1000, 400),
    "100 lines": (post(*["x-a: b"] * 100), 200),
    "header that is no text": (post("user-agent: \xff"), 400),
    "salt that is no text": (post("x-cache-salt: \xff"), 200),
    "id that is no text": (post("x-request-id: \xff\xfe"), 200),
    "trace that is no text": (post("traceparent: \xff"), 200),
    "quality that is no text": (post("x-prfaas-kv-quality: \xff"), 400),
    # --- lines ---
    "unknown method": (head("FOO", PATH), 400),
    "method in small letters": (head("post", PATH), 400),
    "method that is not for it": (head("DELETE", PATH), 405),
    "options": (head("OPTIONS", PATH), 405),
    "options of all": (head("OPTIONS", "*"), 404),
    "trace": (head("TRACE", "/health"), 405),
    "connect": (head("CONNECT", "x:80"), 404),
    "connect to a path": (head("CONNECT", "/health"), 404),
    "head": (head("HEAD", "/health"), 200),
    "head of nothing": (head("HEAD", "/nothing"), 404),
    "absolute target": (post(path="http://other.example/v1/completions"), 200),
    "absolute target that is none": (get("http://[::1/health"), 400),
    "port that is none": (get("http://x:99999/health"), 400),
    "escaped path": (post(path="/v1/%63ompletions"), 200),
    "escaped slash": (post(path="/v1%2fcompletions"), 404),
    "escapes that are none": (get("/v1/models/%zz%f"), 404),
    "escapes that are no text": (get("/v1/models/%ff%fe"), 404),
    "escapes that are no text, of a page": (get("/dashboard/%ff%fe"), 404),
    "escaped zero byte": (get("/prfaas/requests/%00"), 404),
    "path that is no ASCII": (get("/v1/models/\xff\xc3"), 400),
    "path of dots": (get("/v1/models/../../prfaas/cluster"), 404),
    "limit of 5,000 digits": (get("/prfaas/requests?limit=000000001" + "0" * 5000), 400),
    "limit of many zeros": (get("/prfaas/requests?limit=0000000019999"), 400),
    "query": (post(path=PATH + "?a=%ff&b"), 200),
    # --- versions and other protocols ---
    "1.0": (post(version="HTTP/1.0"), 200),
    "1.0 to be kept": (post("connection: keep-alive", version="HTTP/1.0"), 200),
    "1.2": (post(version="HTTP/1.2"), 400),
    "2.0": (post(version="HTTP/2.0"), 505),
    "0.9": (b"GET /health\r\n\r\n", 505),
    "version in small letters": (post(version="http/1.1"), 400),
    "HTTP/2 with prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "upgrade to a web socket": (
        get("/health", "connection: upgrade", "upgrade: websocket"), 200,
    ),
    "upgrade to HTTP/2": (post("connection: upgrade, http2-settings", "upgrade: h2c"), 200),
    "TLS": (bytes.fromhex("16030100c8010000c403") + bytes(range(200)), 400),
    "SSH": (b"SSH-2.0-OpenSSH_9.0\r\n", 400),
    "mail": (b"EHLO example.org\r\n", 400),
    "all bytes": (bytes(range(256)) * 4, 400),
    "blank lines first": (b"\r\n\r\n" + GOOD, 200),
    "close": (post("connection: close"), 200),
}  # fmt: skip


class Conversation:
    """One connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """The next one that is final; CLOSED where none comes. Chunks are joined."""
        try:
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return CLOSED, {}, b""
        version, status = lines[0].split(" ")[:2]
        assert version.startswith("HTTP/"), lines
        if status == "100":
            return await self.answer(has_body=has_body)
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        if not has_body:
            return int(status), fields, b""
        if fields.get("transfer-encoding") != "chunked":
            body = await self.reader.readexactly(int(fields["content-length"]))
            return int(status), fields, body
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return int(status), fields, body


@contextlib.asynccontextmanager
async def talking(port: int) -> AsyncIterator[Conversation]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(30):
            yield Conversation(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def check_error(body: bytes) -> None:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].isprintable()
    assert error["message"]


@pytest.fixture
async def quiet(
    make_cluster: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Any]:
    """A cluster that serves on afterwards, holds nothing, and has had nothing to warn of."""
    async with make_cluster(agents=False, limits={"max_body_bytes": LIMIT_BYTES}) as cluster:
        gateway = cluster.gateway
        before = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}
        with caplog.at_level(logging.INFO):
            caplog.clear()
            yield cluster
            async with talking(gateway.port) as good:
                good.writer.write(GOOD)
                status, fields, _ = await good.answer()
                assert (status, fields["x-request-id"]) == (200, "good")
            await until(lambda: not gateway.front.open, "connections to end")
            await until(lambda: gateway.admission.in_flight == 0, "requests to end")

            def strange() -> set[str]:
                tasks = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}
                return {
                    name for name in tasks - before if "RequestHandler" in name or "front" in name
                }

            await until(lambda: not strange(), "tasks to end")
            await until(lambda: len(gateway.front.unread) <= 1, "sockets to be forgotten")
        assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []
        _, metrics = await cluster.get("/metrics")
        for name in ("prfaas_gateway_in_flight_requests", "prfaas_gateway_fallback_granted_tokens"):
            assert f"\n{name} 0.0" in metrics or name not in metrics


async def test_each_kind_of_request_gets_its_answer(quiet: Any) -> None:
    """In OpenAI's shape where it is an error; a connection that stays open is still in step."""

    async def ask(name: str, data: bytes, expected: int) -> None:
        async with talking(quiet.gateway.port) as client:
            client.writer.write(data)
            status, fields, body = await client.answer(
                has_body=name not in ("head", "head of nothing")
            )
            assert status == expected, (name, status, body)
            if status >= 400 and body:
                check_error(body)
            if fields.get("connection") != "close" and status not in (413, 505):
                client.writer.write(post("x-request-id: next"))
                status, fields, _ = await client.answer()
                assert (status, fields.get("x-request-id")) in [(200, "next"), (CLOSED, None)], name
            if fields.get("connection") == "close":
                assert await client.reader.read() == b"", name

    await asyncio.gather(*(ask(name, *case) for name, case in CASES.items()))
    assert all("x-a" not in seen.headers for seen in quiet.engine.seen)


async def test_a_long_way_may_come_in_any_pieces(quiet: Any) -> None:
    whole = chunked(*CUT, fields=("x-request-id: cut",), end=b"0\r\nx-a: b\r\n\r\n")
    cuts = iter(range(1, len(whole)))

    async def ask_on() -> None:
        async with talking(quiet.gateway.port) as client:
            for cut in cuts:
                client.writer.write(whole[:cut])
                await asyncio.sleep(0.001)
                client.writer.write(whole[cut:])
                status, fields, _ = await client.answer()
                assert (status, fields["x-request-id"]) == (200, "cut")

    await asyncio.gather(*(ask_on() for _ in range(8)))
    assert {seen.raw_body for seen in quiet.engine.seen} == {BODY}


async def test_whatever_is_sent_leaves_nothing(quiet: Any) -> None:
    """Requests with bytes changed, in pieces, given up at any time."""
    rng = random.Random("front")
    quiet.engine.on_request = lambda seen: Script(
        texts=("a",) * rng.choice((1, 4)), first_delay_s=rng.choice((0, 0, 0.002))
    )
    streamed = json.dumps({"model": MODEL, "prompt": "hi", "stream": True}).encode()
    seeds = [data for data, _ in CASES.values() if len(data) < 2000]
    seeds += [GOOD * 3, post(body=streamed), GOOD + chunked(*CUT) + get("/metrics") + GOOD]

    async def ask(data: bytes, cuts: list[int], way: str) -> None:
        async with talking(quiet.gateway.port) as client:
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                client.writer.write(data[start:end])
                await asyncio.sleep(0)
            if way == "reset":
                client.writer.transport.abort()
                return
            if way == "half":
                client.writer.write_eof()
            try:
                async with asyncio.timeout(0.02):
                    while (answer := await client.answer())[0] != CLOSED:
                        if answer[0] >= 400 and answer[2]:
                            check_error(answer[2])
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                return
            except KeyError:  # an answer to HEAD that had become something else
                return

    async def ask_on(asked: Any) -> None:
        for each in asked:
            await ask(*each)

    made = []
    for _ in range(400):
        data = rng.choice(seeds)
        if rng.random() < 0.7:
            data = mutate_bytes(data, seeds, rng)
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(4)))
        made.append((data, cuts, rng.choice(("reset", "half", "wait"))))
    asked = iter(made)
    await asyncio.gather(*(ask_on(asked) for _ in range(16)))


async def test_what_trickles_is_ended(
    make_cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head, and a body of either way, of which a byte comes now and then."""
    monkeypatch.setattr(app, "IDLE_CLIENT_S", 0.3)
    limits = {"slow_client_timeout_s": 0.3}
    starts = {
        b"POST /v1/completions HTTP/1.1\r\nx: ": CLOSED,
        b"": CLOSED,
        b"\n\n": CLOSED,
        b"\r\n\r\n": CLOSED,
        head("POST", PATH, "content-length: 500"): 400,
        head("POST", PATH, "content-length: 500", "connection: close"): 400,
        head("POST", PATH, "transfer-encoding: chunked") + b"5\r\n": 400,
        head("POST", PATH, "transfer-encoding: chunked") + b"5;": 400,
    }

    async def trickle(writer: asyncio.StreamWriter, letter: bytes) -> None:
        while not writer.is_closing():
            writer.write(letter)
            await asyncio.sleep(0.05)

    async def ask(start: bytes, expected: int) -> None:
        async with talking(cluster.gateway.port) as client:
            client.writer.write(start)
            task = asyncio.create_task(trickle(client.writer, b"\n" if start.isspace() else b"A"))
            status, _, body = await client.answer()
            assert status == expected, start
            if status != CLOSED:
                assert "in time" in json.loads(body)["error"]["message"]
            task.cancel()

    async with make_cluster(agents=False, limits=limits) as cluster:
        await asyncio.gather(*(ask(*start) for start in starts.items()))
    assert not cluster.engine.seen


async def test_a_client_that_reads_nothing_is_cut_whoever_writes(
    make_cluster: Callable[..., Any],
) -> None:
    async with make_cluster(agents=False, limits={"slow_client_timeout_s": 0.2}) as cluster:
        front = cluster.gateway.front
        before = len(front.unread)
        async with talking(cluster.gateway.port) as client:
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(2000):  # more than what kernels hold of answers
                client.writer.write(get("/metrics"))
            await until(lambda: len(front.unread) > before, "the connection")
            await until(lambda: len(front.unread) == before, "it to be cut", timeout_s=20)
