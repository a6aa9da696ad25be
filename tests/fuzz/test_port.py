"""KvPort, both sides: what the other process may say, and what an agent makes of its engine."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from local_engine.testing import CHAIN_VOCAB, CoreHarness
from prfaas.kvport import PortServer
from prfaas.settings import Settings
from prfaas.testing.fake_port import FakePort
from prfaas.testing.fuzz import fuzz, fuzz_seconds, mutate_bytes, mutate_json
from prfaas.testing.scripted_port import SCRIPTED_LAYOUT, ScriptedEngine
from prfaas.testing.waiting import eventually
from prfaas_connect.port import messages as port
from prfaas_connect.port.engine import EnginePort
from prfaas_connect.port.messages import PREFIX, PortError, PortMessage, decode, encode, sizes
from remote_prefill.agent_main import AgentServer
from remote_prefill.prefill_main import PrefillServer

HELLO = port.Hello(
    version=port.PORT_VERSION, engine="fuzz", roles=["prefill", "decode"], model="m",
    layout=SCRIPTED_LAYOUT.to_dict(), chunk_tokens=8, block_tokens=4, max_tokens=4096,
    vocab_size=1000, model_identity="i", config_digest="c", tokenizer_digest="t",
    ranks=[[0, 1], [1, 2]], epoch="e1",
)  # fmt: skip
PARAMS = {
    "version": 1, "transfer_id": "t", "plan": [{"peer": "fra", "instance": "p0"}],
    "on_failure": "local", "quality": "exact", "deadline_s": 5.0, "salt": "", "expires": 1e12,
    "mac": "00",
}  # fmt: skip
FROM_ENGINE: tuple[tuple[PortMessage, bytes], ...] = (
    (HELLO, b""),
    (port.Stats(1, 2, 3, 4, 5, 6, 0.1, 0.2, 0.3, 0.4), b""),
    (port.KvEvents("e1", 1, stored=["00" * 16], removed=["11" * 16]), b""),
    (port.Fetch("f1", PARAMS, have=0, want=3, uncached=3), bytes(16)),
    (port.Release("f1", "imported", 3, "00"), b""),
    (port.Abort("f1"), b""),
    (port.Record("x1", 1, 0, 0, 0, 0, 8, 0, 2, 0, 256), b""),
    (port.PrefillEnd("x1", 1, "done", records=1), b""),
)
FROM_AGENT: tuple[tuple[PortMessage, bytes], ...] = (
    (port.Welcome(port.PORT_VERSION, "a", 4096, 4096), b""),
    (port.Refused("no"), b""),
    (port.FetchDone("f1", "staged", "", token_end=3, chunk_tokens=8), b""),
    (port.PrefillStart("x1", 1, 0, "salt"), bytes(range(0, 40, 1)) * 4),
    (port.PrepareFor("x1", 1, "int8"), b""),
    (port.PrefillCancel("x1", 1), b""),
    (port.RingFree(1), b""),
)
ENCODED = [encode(message, blob) for message, blob in (*FROM_ENGINE, *FROM_AGENT)]


def header_of(message: PortMessage) -> dict[str, Any]:
    """A message as the JSON that crosses."""
    data = encode(message)
    header: dict[str, Any] = json.loads(data[PREFIX.size :])
    return header


def mutated(message: PortMessage, blob: bytes, rng: random.Random) -> bytes:
    """A message with its JSON or its blob changed, well framed."""
    header = json.dumps(mutate_json(header_of(message), rng)).encode()
    if rng.random() < 0.2:
        blob = mutate_bytes(blob, [bytes(64)], rng)
    return PREFIX.pack(len(header), len(blob)) + header + blob


def test_headers_become_messages_or_port_errors() -> None:
    def make(rng: random.Random) -> bytes:
        message, _ = rng.choice((*FROM_ENGINE, *FROM_AGENT))
        if rng.random() < 0.5:
            return json.dumps(mutate_json(header_of(message), rng)).encode()
        headers = [data[PREFIX.size :] for data in ENCODED]
        return mutate_bytes(rng.choice(headers), headers, rng)

    def run(data: bytes) -> None:
        message = decode(data)
        # Whatever is let in can be told on, to any of our other parsers.
        assert decode(encode(message)[PREFIX.size :]) == message

    fuzz("port headers", run, make, (PortError,))


def test_a_header_nested_beyond_reason_is_a_port_error() -> None:
    for depth in (100, 990, 5000, 200_000):
        data = b'{"type":"fetch","params":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
        with pytest.raises(PortError):
            decode(data)


def test_sizes_are_bounded_before_memory_is_taken() -> None:
    def run(data: bytes) -> None:
        header_bytes, blob_bytes = sizes(data)
        assert header_bytes + blob_bytes <= port.MAX_HEADER_BYTES + port.MAX_BLOB_BYTES

    def make(rng: random.Random) -> bytes:
        return rng.choice((rng.randbytes(8), PREFIX.pack(rng.randrange(1 << 23), 7)))

    fuzz("port sizes", run, make, (PortError,))


# --- the agent's side, over its socket ---


class _Complaints:
    """Exceptions that ended a task of this loop and were not expected there."""

    def __init__(self) -> None:
        self.found: list[str] = []
        asyncio.get_running_loop().set_exception_handler(self._handle)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found.append(f"{context.get('message')}: {context.get('exception')!r}")

    def check(self) -> None:
        gc.collect()  # a task's exception is complained of when the task is collected
        assert self.found == []


def rude_engine(path: Path, seconds: float, rng: random.Random) -> int:
    """Connect again and again, most times say a good hello first, then rubbish; connections."""
    deadline = time.monotonic() + seconds
    count = 0
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(0.2)
            try:
                sock.connect(str(path))
                good = rng.random() < 0.8
                sock.sendall(encode(HELLO) if good else mutated(HELLO, b"", rng))
                if rng.random() < 0.9:
                    sock.recv(1 << 16)  # the file descriptors are dropped
                for _ in range(rng.randrange(8)):
                    message, blob = rng.choice(FROM_ENGINE[1:])
                    kind = rng.random()
                    if kind < 0.3:
                        data = encode(message, blob)
                    elif kind < 0.9:
                        data = mutated(message, blob, rng)
                    else:
                        data = mutate_bytes(encode(message, blob), ENCODED, rng)
                    sock.sendall(data)
                if rng.random() < 0.3:
                    sock.recv(1 << 16)
            except OSError:
                pass
        count += 1
    return count


@pytest.mark.parametrize("kind", ["agent", "prefill"])
async def test_an_agent_survives_an_engine_that_says_anything(kind: str, tmp_path: Path) -> None:
    complaints = _Complaints()
    path = tmp_path / "a.sock"
    common = {"socket": path, "port": 0, "ring_bytes": 1 << 16}
    settings = Settings.model_validate(
        {
            "agent": {**common, "staging_bytes": 1 << 16, "transfer_keys": ["key"]},
            "prefill": {**common, "retention_bytes": 1 << 20},
        }
    )
    server: Any = AgentServer(settings) if kind == "agent" else PrefillServer(settings)
    await server.start()
    try:
        rng = random.Random(kind)
        count = await asyncio.to_thread(rude_engine, path, 2 * fuzz_seconds(), rng)
        assert count > 20
        engine = ScriptedEngine(path)
        try:
            await engine.start()
            agent = server.agent
            connected = (lambda: agent.side) if kind == "agent" else (lambda: agent.engine)
            await eventually(lambda: connected() is not None)
        finally:
            await engine.close()
        await eventually(lambda: connected() is None)
        complaints.check()
    finally:
        await server.stop()


# --- the engine's side ---


def test_an_engine_survives_an_agent_that_says_anything() -> None:
    """Books balance after every step, and every request ends."""
    rounds = 0

    def run(seed: int) -> None:
        nonlocal rounds
        rng = random.Random(seed)
        port_ = FakePort(staging_bytes=1 << 14, verify_import=rng.random() < 0.5)
        harness = CoreHarness(port=port_, blocks=32)
        harness.runner.strict = False  # what a lying agent stages is no KV of this model
        for name in ("a", "b", "c"):
            prompt = [rng.randrange(CHAIN_VOCAB) for _ in range(rng.randrange(1, 30))]
            harness.submit(name, prompt, 3, params=dict(PARAMS) if name != "c" else None)
            for _ in range(rng.randrange(4)):
                fetches = [fetch.session for fetch in port_.of(port.Fetch)]
                message, blob = rng.choice(FROM_AGENT[2:5])
                header = header_of(message)
                if "session" in header and fetches and rng.random() < 0.8:
                    header["session"] = rng.choice(fetches)
                try:
                    said = decode(json.dumps(mutate_json(header, rng)).encode())
                except PortError:
                    continue
                harness.core.handle(said, mutate_bytes(blob, [blob], rng))
            harness.step(rng.randrange(3))
            port_.allocator.free(len(port_.take(port.Record)))
        harness.core.suspend_transfers()
        port_.disconnect()
        harness.core.disconnected()
        harness.run()
        harness.assert_empty()
        rounds += 1
        if seed % 4 == 0:
            raise PortError("so that some are refused")

    def make(rng: random.Random) -> int:
        return rng.randrange(1 << 30)

    fuzz("engine core", run, make, (PortError,))
    assert rounds > 5


class _Listener:
    """An EngineHandler that counts."""

    def __init__(self) -> None:
        self.connections = 0
        self.up = threading.Event()

    def on_connected(self, welcome: port.Welcome) -> None:
        self.connections += 1
        self.up.set()

    def on_disconnected(self, reason: str) -> None:
        self.up.clear()

    def on_message(self, message: PortMessage, blob: bytes) -> None:
        return


async def test_an_engine_port_comes_back_from_any_agent(tmp_path: Path) -> None:
    """Its two threads outlive whatever stands at the path, and find the good agent in the end."""
    path = tmp_path / "a.sock"
    listener = _Listener()
    engine = EnginePort(str(path), HELLO, listener, reconnect_s=0.001)
    engine.start()
    try:
        await asyncio.to_thread(rude_agent, path, 2 * fuzz_seconds(), random.Random("rude agent"))

        async def stay(conn: Any) -> None:
            async for _ in conn:
                pass

        server = PortServer(
            path, agent_name="good", ring_bytes=4096, staging_bytes=4096, on_engine=stay
        )
        listener.up.clear()
        await server.start()
        try:
            await eventually(lambda: engine.connected and listener.up.is_set())
        finally:
            await server.close()
    finally:
        await asyncio.to_thread(engine.close)


def rude_agent(path: Path, seconds: float, rng: random.Random) -> None:
    """Accept an engine again and again and say anything, with any descriptors."""
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as listening, (path.parent / "memory").open("w+b") as memory:
        memory.truncate(4096)
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(0.2)
        while time.monotonic() < deadline:
            try:
                client, _ = listening.accept()
            except TimeoutError:
                continue
            with client:
                client.settimeout(0.2)
                try:
                    client.recv(1 << 16)
                    _speak(client, memory.fileno(), rng)
                except OSError:
                    continue
    path.unlink()


def _speak(client: socket.socket, memory: int, rng: random.Random) -> None:
    welcome, blob = FROM_AGENT[0]
    first = encode(welcome, blob) if rng.random() < 0.5 else mutated(welcome, blob, rng)
    if rng.random() < 0.1:
        first = mutate_bytes(first, ENCODED, rng) or b"\0"
    socket.send_fds(client, [first], [memory] * rng.choice((0, 1, 2, 2, 2, 2, 2)))
    for _ in range(rng.randrange(5)):
        message, blob = rng.choice(FROM_AGENT[1:])
        data = mutated(message, blob, rng) if rng.random() < 0.7 else encode(message, blob)
        client.sendall(data if rng.random() < 0.8 else mutate_bytes(data, ENCODED, rng))
