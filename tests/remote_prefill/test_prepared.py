"""KV that the engine's accelerator has prepared, over real sockets: the same bytes reach D."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from local_engine.kv_encode import ChannelsEncoder, Int8Encoder, KvEncoder
from prfaas.codecs import Bytes, Calibration, Quality, Tile
from prfaas.codecs.calibration import Header, Measured, Rung
from prfaas.codecs.native import native
from prfaas.testing.scripted_port import SCRIPTED_LAYOUT, PrefillScript
from prfaas.testing.waiting import eventually
from prfaas_connect.port.messages import PrepareFor
from remote_prefill import codec_choice

if native is None:
    pytest.skip("the C extension was not built", allow_module_level=True)

(GROUP,) = SCRIPTED_LAYOUT.groups
LAYERS, WIDTH = len(GROUP.layers), GROUP.kv_heads * GROUP.head_dim
GOOD = Measured(2400, 1e-6, 1e-5, 1.0, 1.0, 1e-3, 3.0, 1e-6)
RUNG = Rung("near-channels", Quality.NEAR, 0.01, measured=GOOD)
PROMPT = 60


def calibration() -> Calibration:
    metric = np.zeros((LAYERS, 2, GROUP.kv_heads, GROUP.head_dim, GROUP.head_dim), np.float32)
    metric[:] = np.eye(GROUP.head_dim)
    return Calibration(
        Header(1, "identity", GROUP.layers, GROUP.kv_heads, GROUP.head_dim, ((0, LAYERS),),
               (RUNG, Rung("int8", Quality.NEAR, 1.0, measured=RUNG.measured))),
        np.zeros(0, np.float32), np.zeros((LAYERS, 2, WIDTH), np.float32),
        np.ones((LAYERS, 2, WIDTH), np.float32), metric,
        (np.eye(LAYERS * WIDTH, dtype=np.float32),) * 2,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def first_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the loopback's goodput: the first codec that both sides have."""
    monkeypatch.setattr(codec_choice, "choose", lambda codecs, *_, **__: codecs[0])


class Accelerator:
    """Prepares what its engine is asked for."""

    def __init__(self, encoder: KvEncoder) -> None:
        self.encoder = encoder
        self.able = True
        self.prepared = 0
        self.script = PrefillScript(prepare=self)

    def __call__(self, codec: str, raw: Bytes, tile: Tile) -> Bytes | None:
        if not self.able or codec != self.encoder.name:
            return None
        if not 0 < self.encoder.prepared_bytes(tile) < tile.nbytes:
            return None
        self.prepared += 1
        shape = (2, tile.tokens, tile.heads, tile.head_dim)
        kv = torch.from_numpy(raw.copy()).view(torch.bfloat16).view(shape)
        made: Bytes = self.encoder.prepare(kv, tile)[:-1].numpy()
        return made


@pytest.mark.parametrize("name", ["int8", "near-channels"])
async def test_d_gets_the_same_kv_whoever_did_the_first_part(
    prefill_site: Any, decode_site: Any, tokens: Any, tmp_path: Path, name: str
) -> None:
    calibration().save(tmp_path / "c.npz")
    encoder: KvEncoder = Int8Encoder()
    if name == "near-channels":
        encoder = ChannelsEncoder(Calibration.load(tmp_path / "c.npz"), torch.device("cpu"))
    fields = {"codecs": [name, "raw"], "codec_calibration": tmp_path / "c.npz"}
    device = Accelerator(encoder)
    engine = {"chunk_tokens": 32, "script": device.script, "encodes": [encoder.name]}
    p = await prefill_site(engine=engine, **fields)
    d = await decode_site({"fra/p0": p}, engine={"chunk_tokens": 32}, **fields)
    await d.ready("fra/p0")
    prompt, staged, carried = tokens(PROMPT), [], []
    for able in (False, True):
        device.able = able
        device.script.go.clear()
        device.script.stop_before = (0, 0)
        params = d.params("fra/p0", quality="near")
        fetch = asyncio.ensure_future(d.engine.fetch(params, prompt))
        await eventually(lambda count=1 + able: p.engine.asked == [encoder.name] * count)
        device.script.go.set()
        done = await fetch
        assert (done.status, done.reason) == ("staged", "")
        assert device.prepared == (2 * LAYERS if able else 0)
        staged.append(d.engine.staged_bytes(done, 0).copy())
        d.engine.release(done)
        carried.append((await d.outcome(params)).codecs)
    await d.clean(p)
    assert carried[0] == carried[1]
    assert carried[1][name] > 0
    assert (staged[0] == staged[1]).all()


@pytest.mark.parametrize("wrong", ["size", "codec"])
async def test_what_was_prepared_wrong_fails_the_session_and_nothing_else(
    prefill_site: Any, decode_site: Any, tokens: Any, tmp_path: Path, wrong: str
) -> None:
    calibration().save(tmp_path / "c.npz")
    fields = {"codecs": ["int8", "raw"], "codec_calibration": tmp_path / "c.npz"}
    p = await prefill_site(engine={"encodes": ["int8"]}, **fields)
    d = await decode_site({"fra/p0": p}, **fields)
    await d.ready("fra/p0")
    script = p.engine.script
    script.stop_before = (0, 0)
    params = d.params("fra/p0", quality="near")
    fetch = asyncio.ensure_future(d.engine.fetch(params, tokens(PROMPT)))
    await eventually(lambda: p.engine.asked == ["int8"])
    script.prepare = lambda codec, raw, tile: raw[:-1] if wrong == "size" else raw
    if wrong == "codec":
        # One that the session has, and none to prepare for.
        start, _ = p.engine.prefills[-1]
        p.engine.on_message(PrepareFor(start.session, start.epoch, "raw"), b"")
    script.go.set()
    done = await fetch
    assert done.status == "local"
    script.prepare = None
    again = await d.engine.fetch(d.params("fra/p0", quality="near"), tokens(PROMPT))
    assert (again.status, again.reason) == ("staged", "")
    d.engine.release(again)
    await d.clean(p)
