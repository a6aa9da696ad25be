"""Rubbish on every port of every process: refused, nothing crashes, service goes on."""

from __future__ import annotations

import gzip
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from prfaas.frames import Frame, FrameType
from prfaas.testing.asking import Asker, make_prompt
from prfaas.testing.footprint import ProcessSize, growth, most, sizes, wait_nothing_held
from prfaas.testing.stack import RunningStack, wait_until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATIENCE_S = 0.15
KNOCKERS = 24


def client_hello() -> bytes:
    """What a TLS client says first."""
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="p")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def http2_frame(kind: int, flags: int, stream: int, payload: bytes, length: int = -1) -> bytes:
    size = len(payload) if length < 0 else length
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def scripts(rng: random.Random) -> dict[str, bytes]:
    """What is sent, by name; every connection then waits a little for an answer."""
    junk = rng.randbytes(5000)
    opened = PREFACE + http2_frame(4, 0, 0, b"")
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    return {
        "nothing": b"",
        "random": junk,
        "zeros": bytes(5000),
        "tls": client_hello() + junk[:100],
        "http2 preface": PREFACE,
        "http2 preface and junk": PREFACE + junk,
        "http2 settings flood": PREFACE + http2_frame(4, 0, 0, b"") * 500,
        "http2 ping flood": opened + http2_frame(6, 0, 0, b"8" * 8) * 500,
        "http2 headers of junk": opened + http2_frame(1, 5, 1, junk[:500]),
        "http2 a frame of 16 MB": PREFACE + http2_frame(0, 0, 1, b"x", (1 << 24) - 1),
        "http2 resets": opened
        + b"".join(
            http2_frame(1, 4, 2 * i + 1, b"\x82\x86\x84") + http2_frame(3, 0, 2 * i + 1, bytes(4))
            for i in range(300)
        ),
        "half a request": post + b"content-le",
        "a body that never comes": post + b"content-length: 5000\r\n\r\n{",
        "a negative length": post + b"content-length: -1\r\n\r\n{}",
        "an endless length": post + b"content-length: 99999999999999999999\r\n\r\n{}",
        "two lengths": post + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        "a chunk of 2^63": post + b"transfer-encoding: chunked\r\n\r\n7fffffffffffffff\r\nx",
        "length and chunks": post
        + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        "a long line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        "a long header": b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
        "many headers": b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
        "another method": b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n",
        "another version": b"GET / HTTP/7.7\r\nhost: x\r\n\r\n",
        "an upgrade": b"GET / HTTP/1.1\r\nhost: x\r\n" + upgrade,
        "a small bomb": bomb(post, 64 << 20),
        "salt of junk": post + b"x-cache-salt: \xff\xfe\r\nuser-agent: \xff\r\n" + json_body(),
        "trace of junk": post + b"traceparent: \xff\r\ntracestate: \xff\r\n" + json_body(),
        "a port message": (8).to_bytes(4, "little") + (1 << 24).to_bytes(4, "little") + b"{}",
        "a port message of 4 GB": b"\xff" * 8,
        "a session": Frame(FrameType.OPEN, 1, 1, payload=junk[:100]).serialize(),
    }  # fmt: skip


def bomb(post: bytes, nbytes: int) -> bytes:
    body = gzip.compress(b" " * nbytes, 9)
    head = f"content-encoding: gzip\r\ncontent-length: {len(body)}\r\n\r\n"
    return post + head.encode() + body


def json_body() -> bytes:
    body = b'{"model":"test-model","prompt":[11,12,13],"max_tokens":1}'
    return b"content-length: %d\r\n\r\n%b" % (len(body), body)


def doors(stack: RunningStack) -> dict[str, tuple[str, int] | str]:
    """Every address at which somebody of the stack listens."""
    ports, directory = stack.stack.ports, stack.stack.directory
    found: dict[str, tuple[str, int] | str] = {
        name: ("127.0.0.1", port)
        for name, port in {
            "gateway": ports.gateway,
            "d-engine": ports.d_engine,
            "p-engine": ports.p_engine,
            "d-agent": ports.d_agent,
            "p-agent": ports.p_agent,
            **{f"metrics of {name}": port for name, port in stack.metrics_ports.items()},
        }.items()
    }
    return found | {f"{name}.sock": str(directory / f"{name}.sock") for name in ("d", "p")}


def knock(where: tuple[str, int] | str, data: bytes, rng: random.Random) -> None:
    """Send it, in one piece or in several, wait a little for whatever comes, and leave."""
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
    with socket.socket(family) as sock:
        sock.settimeout(2.0)
        try:
            sock.connect(where)
            cut = rng.randrange(len(data) + 1)
            for part in (data[:cut], data[cut:]):
                sock.sendall(part)
                time.sleep(0.01)
            sock.settimeout(PATIENCE_S)
            while sock.recv(65536):
                pass
        except OSError:
            return


def tracebacks(log: str) -> list[str]:
    """What a process was not prepared for, with the line before it."""
    lines = log.splitlines()
    found = [max(0, at - 1) for at, line in enumerate(lines) if line.startswith("Traceback")]
    return ["\n".join(lines[at : at + 15]) for at in found]


@contextmanager
def serving_exactly(stack: RunningStack) -> Iterator[None]:
    """The stack goes on serving while the context lasts; after it it holds nothing, and nobody met
    an error it was not prepared for.
    """
    logs = {name: len(stack.log(name)) for name in stack.pids}
    stop = threading.Event()
    wrong: list[str] = []
    served = 0

    def serve() -> None:
        nonlocal served
        with Asker(stack, max_tokens=4) as asker:
            while not stop.is_set():
                prompt = make_prompt(120, f"rubbish/{served}")
                answer = asker.ask(prompt)
                if answer.status != 200 or answer.token_ids != asker.right(prompt):
                    wrong.append(f"{answer.status} {answer.body}")
                served += 1

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
        wait_until(lambda: served > 3, 20, "the stack to serve")
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    wait_nothing_held(stack)
    for name, length in logs.items():
        assert tracebacks(stack.log(name)[length:]) == [], name


def test_rubbish_at_every_door(slow: RunningStack) -> None:
    rng = random.Random("rubbish")
    pids = slow.pids
    sent = scripts(rng)
    knocks = [(where, data) for where in doors(slow).values() for data in sent.values()]

    def size_after_knocks() -> dict[str, ProcessSize]:
        rng.shuffle(knocks)
        with serving_exactly(slow), ThreadPoolExecutor(KNOCKERS) as pool:
            list(pool.map(lambda knocked: knock(*knocked, rng), knocks))
        return sizes(slow)

    # What is unpacked and dropped comes and goes by tens of megabytes from round to round; a leak
    # only grows. So the most of two rounds is what the others are held against.
    before = most(size_after_knocks(), size_after_knocks())
    for _attempt in range(4):
        grown = growth(before, size_after_knocks(), spare_fds=8)
        if not grown:
            break
    assert grown == []
    assert slow.pids == pids


def test_rubbish_in_good_grpc(slow: RunningStack) -> None:
    """Well-formed calls with bytes of no sense: an error each, and the channel lives on."""
    rng = random.Random("grpc")
    methods = [
        "/prfaas.rpc.v1.Prefill/Handshake",
        "/prfaas.rpc.v1.Prefill/Ping",
        "/prfaas.rpc.v1.Prefill/Cancel",
        "/prfaas.rpc.v1.Prefill/Session",
        "/prfaas.rpc.v1.Prefill/Data",
        "/prfaas.rpc.v1.Telemetry/Watch",
        "/prfaas.rpc.v1.Nothing/AtAll",
        "/",
    ]
    calls: list[Callable[[grpc.Channel, str, bytes], object]] = [
        lambda channel, method, data: channel.unary_unary(method)(data, timeout=0.2),
        lambda channel, method, data: list(channel.unary_stream(method)(data, timeout=0.2)),
        lambda channel, method, data: list(
            channel.stream_stream(method)(iter([data, data]), timeout=0.2)
        ),
    ]
    opening = Frame(FrameType.OPEN, 7, 1, payload=rng.randbytes(50)).serialize()
    with serving_exactly(slow):
        for port in (slow.stack.ports.p_agent, slow.stack.ports.d_agent):
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                for method in methods:
                    for data in (b"", rng.randbytes(300), opening, opening + opening[:70]):
                        for call in calls:
                            try:
                                call(channel, method, data)
                            except grpc.RpcError:
                                continue


def test_no_socket_of_a_stack_is_open_to_other_users(slow: RunningStack) -> None:
    for name in ("d.sock", "p.sock"):
        assert Path(slow.stack.directory / name).stat().st_mode & 0o077 == 0
