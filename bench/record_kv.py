"""Record the KV of the demo model once, through KvPort, for replayers: `python -m bench.record_kv`.

Any engine that speaks KvPort could be recorded like this; nothing here looks into it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from bench.prompts import natural_text
from local_engine.demo_model import fetch_demo_model
from prfaas.errors import ConfigError, EngineUnavailable, PrfaasError
from prfaas.kvport import EngineConn, PortServer
from prfaas.testing.kv_tape import Bytes, KvTape, seeded_tape
from prfaas.up.paths import default_cache_dir
from prfaas.up.process import ManagedProcess, ProcessSpec
from prfaas_connect.port.messages import PrefillEnd, PrefillStart, Record, RingFree

TOKENS = 2048
FILE = "smollm2.kv-tape.npz"

_RING_BYTES = 64 << 20
_READY_TIMEOUT_S = 120.0
_PREFILL_TIMEOUT_S = 300.0
_STOP_GRACE_S = 10.0

Say = Callable[[str], None]


class Recorder:
    """Takes the records of one prefill out of the ring of whatever engine connects."""

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        self._conn: EngineConn | None = None
        self._groups: list[Bytes] = []
        self._filled = 0
        self._ended: asyncio.Future[PrefillEnd] = asyncio.get_running_loop().create_future()

    async def on_engine(self, conn: EngineConn) -> None:
        self._conn = conn
        self.connected.set()
        async for message, _ in conn:
            if isinstance(message, Record):
                self._keep(conn, message)
            elif isinstance(message, PrefillEnd):
                self._ended.set_result(message)

    async def record(self, tokens: list[int], source: str) -> KvTape:
        """KV of all of `tokens`. Raises EngineUnavailable if the engine did not make it."""
        conn = self._conn
        assert conn is not None
        layout = conn.layout
        self._groups = [
            np.zeros((len(g.layers), 2, len(tokens), g.token_bytes // 2), dtype=np.uint8)
            for g in layout.groups
        ]
        blob = np.asarray(tokens, dtype="<i4").tobytes()
        conn.send(PrefillStart("tape", 1, 0, use_cache=False), blob)
        end = await asyncio.wait_for(self._ended, _PREFILL_TIMEOUT_S)
        if end.status != "done" or self._filled != layout.session_bytes(0, len(tokens)):
            raise EngineUnavailable(f"the engine did not export it all: {end}")
        return KvTape(layout, self._groups, source)

    def _keep(self, conn: EngineConn, record: Record) -> None:
        group = conn.layout.groups[record.group]
        tokens = record.token_end - record.token_start
        heads = record.head_end - record.head_start
        raw = np.frombuffer(conn.ring, np.uint8)[record.offset :][: record.nbytes]
        rows = self._groups[record.group][group.layers.index(record.layer)]
        rows = rows.reshape(2, -1, group.kv_heads, group.head_dim * group.item_bytes)
        rows[:, record.token_start : record.token_end, record.head_start : record.head_end] = (
            raw.reshape(2, tokens, heads, -1)
        )
        self._filled += record.nbytes
        conn.send(RingFree(1))


async def record_demo_model(cache_dir: Path, tokens: int, say: Say) -> KvTape:
    """KV of the first `tokens` tokens of English text. Raises PrfaasError, OSError."""
    model = fetch_demo_model(cache_dir, say)
    say(f"recording the KV of {tokens} tokens of {model.name}")
    with tempfile.TemporaryDirectory(prefix="prfaas-tape-") as name:
        directory = Path(name)
        socket = directory / "port.sock"
        recorder = Recorder()
        server = PortServer(
            socket,
            agent_name="recorder",
            ring_bytes=_RING_BYTES,
            staging_bytes=4096,
            on_engine=recorder.on_engine,
        )
        await server.start()
        engine = ManagedProcess(
            ProcessSpec(
                "engine",
                (
                    *("-m", "prfaas", "engine", "--port", "0"),
                    *("--model", str(model), "--port-socket", str(socket)),
                ),
                directory / "engine.log",
            )
        )
        try:
            await engine.start()
            port = await engine.wait_ready(_READY_TIMEOUT_S)
            await asyncio.wait_for(recorder.connected.wait(), _READY_TIMEOUT_S)
            ids = await asyncio.to_thread(_tokenise, port)
            return await recorder.record(ids[:tokens], f"{model.stem}, {tokens} tokens of English")
        finally:
            await engine.stop(_STOP_GRACE_S)
            await server.close()


def _tokenise(port: int) -> list[int]:
    body = json.dumps({"prompt": natural_text()[: 16 * TOKENS]}).encode()
    url = f"http://127.0.0.1:{port}/tokenize"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        found: list[int] = json.load(reply)["tokens"]
    return found


def tape_file(say: Say, cache_dir: Path | None = None) -> tuple[Path, KvTape]:
    """The recorded tape, made now if it was not yet; a seeded one where that does not work."""
    directory = cache_dir or default_cache_dir()
    path = directory / FILE
    try:
        return path, KvTape.load(path)
    except ConfigError:
        directory.mkdir(parents=True, exist_ok=True)
    try:
        tape = asyncio.run(record_demo_model(directory, TOKENS, say))
    except (PrfaasError, OSError, TimeoutError) as exc:
        say(f"no recording of the demo model ({exc}); replaying seeded KV instead")
        path, tape = directory / "seeded.kv-tape.npz", seeded_tape(TOKENS)
    tape.save(path)
    return path, tape


@click.command()
@click.option("--tokens", type=click.IntRange(64, 8000), default=TOKENS, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Default: the cache directory.")
def main(tokens: int, out: Path | None) -> None:
    """Record the demo model's KV anew."""
    cache_dir = default_cache_dir()
    tape = asyncio.run(record_demo_model(cache_dir, tokens, click.echo))
    path = out or cache_dir / FILE
    tape.save(path)
    click.echo(f"{tape!r} in {path}")


if __name__ == "__main__":
    main()
