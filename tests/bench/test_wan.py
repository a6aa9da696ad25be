"""The parts of the wan benchmark: baselines, recorder, CPU clock, and as root the site itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.record_kv import Recorder
from bench.wan_baselines import Fetched
from bench.wan_measure import Conditions, Measuring
from bench.wan_site import SiteError, WanSite, add_loopback, baseline, process_cpu_s
from bench.wanlink import WanLink, available
from prfaas.kvport import PortServer
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.testing.kv_tape import seeded_tape
from prfaas.testing.replayer import ReplayEngine, seeded_prompt

REPOSITORY = Path(__file__).resolve().parents[2]
REASON = available()
LAYOUT = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0, 2), 2, 8, "bfloat16"),
        LayerGroup(GroupKind.FULL, (1,), 1, 4, "float32"),
    )
)


@contextmanager
def ends(kind: str) -> Iterator[subprocess.Popen[bytes]]:
    """A client of a server on loopback."""
    command = [sys.executable, "-m", "bench.wan_baselines"]
    pipes = {"cwd": REPOSITORY, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, f"{kind}-server", "127.0.0.1"], **pipes) as server:
        assert server.stdout is not None
        port = server.stdout.readline().decode().strip()
        arguments = [*command, f"{kind}-client", "127.0.0.1", port]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, **pipes) as client:
            try:
                yield client
            finally:
                client.kill()
                server.kill()


def ask(client: subprocess.Popen[bytes], **command: object) -> Fetched:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(json.dumps(command).encode() + b"\n")
    client.stdin.flush()
    return Fetched(**json.loads(client.stdout.readline()))


@pytest.mark.parametrize(("kind", "connections"), [("raw", 1), ("raw", 4), ("grpc", 1), ("aio", 1)])
def test_baselines_bring_exactly_what_was_asked_for(kind: str, connections: int) -> None:
    with ends(kind) as client:
        for nbytes, fresh in ((1, True), (5_000_001, False), (3 << 20, True)):
            found = ask(client, nbytes=nbytes, connections=connections, fresh=fresh)
            assert found.nbytes == nbytes
            assert 0 < found.elapsed_s < 10
        assert bool(found.congestion_control) == (kind == "raw")


def test_cpu_of_another_process_is_read_to_less_than_a_tick() -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time(), flush=1)"
    code += "\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout is not None
        own_s = float(process.stdout.readline())
        seen_s = process_cpu_s(process.pid)
        process.kill()
    assert own_s - 1e-4 <= seen_s < own_s + 0.05
    assert process_cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)


async def test_a_recording_is_what_the_engine_exported(tmp_path: Path) -> None:
    played, tokens = seeded_tape(40, LAYOUT), 100
    recorder = Recorder()
    server = PortServer(
        tmp_path / "port.sock",
        agent_name="recorder",
        ring_bytes=4096,
        staging_bytes=4096,
        on_engine=recorder.on_engine,
    )
    await server.start()
    engine = ReplayEngine(tmp_path / "port.sock", played, chunk_tokens=16)
    try:
        await asyncio.to_thread(engine.start)
        await recorder.connected.wait()
        prompt = seeded_prompt(tokens, 1)
        tape = await recorder.record(prompt.tolist(), "again")
    finally:
        engine.close()
        await server.close()
    assert (tape.tokens, tape.layout) == (tokens, LAYOUT)
    start = played.start_of(prompt)
    for gi, group in enumerate(LAYOUT.groups):
        for layer in group.layers:
            for at, piece in tape.pieces(0, gi, layer, 0, tokens):
                assert played.equals(piece.reshape(-1), start, gi, layer, at, at + tokens)


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_over_the_emulated_link_sessions_come_right_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.wan_measure.REST_S", 0.0)
    tape = tmp_path / "tape.npz"
    seeded_tape(512).save(tape)
    with (
        WanLink(500e6, 5) as link,
        baseline(link, "raw", tmp_path) as raw,
        baseline(link, "grpc", tmp_path) as grpc,
        baseline(link, "aio", tmp_path) as aio,
        WanSite(link, tmp_path, tape) as site,
    ):
        at = Measuring(Conditions("test", 500e6, 5), link, site, raw, grpc, aio)
        at.warm_up((1, 2))
        before = site.received_wire_bytes()
        for arm in (at.ours("ours", 4 << 20, warm=False), at.raw("raw", 4 << 20, 2)):
            assert 10 < arm < 500
        moved_bytes = site.received_wire_bytes() - before
        assert moved_bytes == pytest.approx(4 << 20, rel=0.05)
        assert at.ours_cpu("cpu", 1 << 20, 2) > 0
        assert at.plain_grpc_cpu("aio", 1 << 20, 2) > 0
        assert at.plain_grpc_cpu("grpc", 1 << 20, 2, threads=True) > 0
        assert "line" in at.arm_note("ours")
        assert "bbr" in at.conditions_note() or "cubic" in at.conditions_note()
        with pytest.raises(SiteError, match="did not come whole"):
            site.fetch(1 << 20)  # more than P's longest prompt


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_the_plain_site_carries_kv_as_it_is_and_has_no_certificates(tmp_path: Path) -> None:
    tape = tmp_path / "tape.npz"
    seeded_tape(64).save(tape)
    with WanLink(500e6, 5) as link, WanSite(link, tmp_path, tape, plain=True) as site:
        before = site.received_wire_bytes()
        found = site.fetch(1000)
        moved_bytes = site.received_wire_bytes() - before
        assert found.raw_bytes < moved_bytes < 1.01 * found.raw_bytes
        cpu = site.cpu()
        site.fetch(1000)
        spent = site.cpu() - cpu
        assert spent.agents_s > 0
        assert spent.ports_s > 0
    assert not (tmp_path / "tls").exists()


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_ports_that_bind_loopback_only_can_be_reached_over_the_link() -> None:
    serve = "import socket; s = socket.create_server(('127.18.0.1', 7000)); print(flush=True); "
    serve += "c, peer = s.accept(); c.sendall(peer[0].encode())"
    call = "import socket; print(socket.create_connection(('127.18.0.1', 7000), 5).recv(99))"
    with WanLink(100e6, 10) as link:
        add_loopback(link)
        server = link.run_in("a", [sys.executable, "-c", serve], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        crossed = link.stats().ab.packets
        client = link.run_in("b", [sys.executable, "-c", call], stdout=subprocess.PIPE)
        assert client.communicate(timeout=10)[0] == b"b'127.18.0.2'\n"
        assert link.stats().ab.packets > crossed
