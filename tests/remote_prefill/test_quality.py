"""Quality classes over real sockets: what both sides have within the class, and nothing worse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas.codecs import Calibration, agent_codecs
from prfaas.codecs.calibration import Header, Measured, Rung
from prfaas.codecs.native import native
from prfaas.quality import Quality
from prfaas.testing.scripted_port import SCRIPTED_LAYOUT
from remote_prefill import codec_choice

if native is None:
    pytest.skip("the C extension was not built", allow_module_level=True)

GOOD = Measured(2400, 1e-6, 1e-5, 1.0, 1.0, 1e-3, 3.0, 1e-6)
BAD = Measured(2400, 1.0, 1.0, 0.1, 1.0, 1.0, 3.0, 1.0)
PROMPT = 60
NAMES = ["near-channels", "planes-zstd", "raw"]
ENGINE = {"chunk_tokens": 32}


def calibration(
    path: Path, *, step: float = 0.01, model: str = "identity", measured: Measured = GOOD
) -> Path:
    """Of the scripted engine's KV, channel by channel."""
    (group,) = SCRIPTED_LAYOUT.groups
    layers, width = len(group.layers), group.kv_heads * group.head_dim
    metric = np.broadcast_to(
        np.eye(group.head_dim, dtype=np.float32),
        (layers, 2, group.kv_heads, group.head_dim, group.head_dim),
    ).copy()
    rungs = (
        Rung("near-channels", Quality.NEAR, step, measured=measured),
        Rung("int8", Quality.NEAR, 1.0, measured=measured),
    )
    Calibration(
        Header(1, model, group.layers, group.kv_heads, group.head_dim, ((0, layers),), rungs),
        np.zeros(0, np.float32),
        np.zeros((layers, 2, width), np.float32),
        np.ones((layers, 2, width), np.float32),
        metric,
        (np.eye(layers * width, dtype=np.float32),) * 2,
    ).save(path)
    return path


@pytest.fixture(autouse=True)
def fewest_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the loopback's goodput: the first codec that both sides have."""
    monkeypatch.setattr(codec_choice, "choose", lambda codecs, *_, **__: codecs[0])


async def brought(p: Any, d: Any, tokens: Any, quality: str) -> Any:
    """The outcome of one fetch, and how far off the values are."""
    await d.ready("fra/p0")
    prompt, params = tokens(PROMPT), d.params("fra/p0", quality=quality)
    done = await d.engine.fetch(params, prompt)
    assert (done.status, done.reason) == ("staged", "")
    right = d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    outcome = await d.outcome(params)
    assert done.quality == outcome.quality
    assert sum(outcome.codecs.values()) == outcome.raw_bytes
    await d.clean(p)
    return outcome, right


async def test_a_calibrated_codec_that_both_have_is_used_within_the_class(
    prefill_site: Any, decode_site: Any, tokens: Any, tmp_path: Path
) -> None:
    fields = {"codecs": NAMES, "codec_calibration": calibration(tmp_path / "c.npz")}
    p = await prefill_site(engine=ENGINE, **fields)
    d = await decode_site({"fra/p0": p}, engine=ENGINE, **fields)
    outcome, right = await brought(p, d, tokens, "near")
    assert outcome.quality == "near"
    assert outcome.codecs["near-channels"] > outcome.raw_bytes / 2
    assert not right
    for metrics in (p.agent.metrics, d.agent.metrics):
        sent = metrics.codec_raw_bytes.labels("near-channels")._value.get()
        assert sent == outcome.codecs["near-channels"]
        assert metrics.codec_wire_bytes.labels("near-channels")._value.get() < sent
    assert d.agent.metrics.quality_fetches.labels("near", "near")._value.get() == 1
    exact, right = await brought(p, d, tokens, "exact")
    assert (exact.quality, right) == ("exact", True)
    assert "near-channels" not in exact.codecs


async def test_other_calibrations_leave_only_exact_codecs(
    prefill_site: Any, decode_site: Any, tokens: Any, tmp_path: Path
) -> None:
    ours, theirs = (calibration(tmp_path / f"{step}.npz", step=step) for step in (0.01, 0.02))
    p = await prefill_site(codecs=NAMES, codec_calibration=ours)
    d = await decode_site({"fra/p0": p}, codecs=NAMES, codec_calibration=theirs)
    assert any(name.startswith("near-channels@") for name in p.agent.codecs.names)
    outcome, right = await brought(p, d, tokens, "compact")
    assert (outcome.quality, right) == ("exact", True)
    assert set(outcome.codecs) <= {"planes-zstd", "raw"}


async def test_what_is_calibrated_for_another_model_is_not_offered(
    prefill_site: Any,
    decode_site: Any,
    tokens: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = calibration(tmp_path / "c.npz", model="another")
    fields = {"codecs": NAMES, "codec_calibration": file}
    p = await prefill_site(**fields)
    d = await decode_site({"fra/p0": p}, **fields)
    outcome, right = await brought(p, d, tokens, "near")
    assert (outcome.quality, right) == ("exact", True)
    assert "calibrated for another model than 'scripted-model': near-channels@" in caplog.text


def test_only_codecs_measured_to_keep_their_class_are_offered(tmp_path: Path) -> None:
    names = ["near-channels", "int8", "raw"]
    good = agent_codecs(names, calibration(tmp_path / "good.npz"))
    assert [name.partition("@")[0] for name in good.names] == names
    assert agent_codecs(names, calibration(tmp_path / "bad.npz", measured=BAD)).names == ("raw",)
    assert agent_codecs(names).names == ("raw",)  # nothing is known of any lossy one
    assert good.for_model("identity").names == good.names
    assert good.for_model("another").names == ("raw",)
