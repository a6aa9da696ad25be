"""Calibrating a tiny model: what is recorded is what the engine computes, and what comes out keeps
what it says.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from local_engine.kv_calibration import rungs, texts
from local_engine.kv_calibration.evaluate import kl, measure, prompt, through, worst_tensor
from local_engine.kv_calibration.fit import Fit, fit, spans_of
from local_engine.kv_calibration.moments import (
    QueryMoments,
    output_moments,
    root,
    samples,
    turn_back,
)
from local_engine.kv_calibration.run import Sizes, calibrate
from local_engine.kv_calibration.rungs import find_rungs, spans_for
from local_engine.kv_calibration.tape import Tape, continued, free_running, record
from local_engine.kv_calibration.weights import layer_weights
from local_engine.loader import LoadedModel, load_model
from prfaas.codecs import SINK_TOKENS, Calibration, Quality
from prfaas.codecs.calibration import Rung
from prfaas.codecs.gate import Bounds
from prfaas.codecs.native import native
from prfaas.errors import ConfigError
from prfaas.testing.tinymodel import make_tiny_model

if native is None:
    pytest.skip("the C extension was not built", allow_module_level=True)

from prfaas.codecs.transform import make_codec

TINY = Sizes((192,) * 2, (96,), (64, 80), 32, 1, 48, 16)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(make_tiny_model(tmp_path_factory.mktemp("model"), seed=3))


@pytest.fixture(scope="module")
def tape(loaded: LoadedModel) -> Tape:
    ids = loaded.tokenizer.encode(texts.calibration_text()[:4000])
    return record(loaded.model, ids[:300])


def test_kv_does_not_depend_on_where_chunks_begin(loaded: LoadedModel, tape: Tape) -> None:
    short = record(loaded.model, tape.tokens[:100])
    assert torch.equal(short.kv, tape.kv[:, :, :100])


def test_continuing_behind_kv_is_going_on(loaded: LoadedModel, tape: Tape) -> None:
    whole = continued(loaded.model, tape.kv[:, :, :0], tape.tokens[:120])
    part = continued(loaded.model, tape.kv[:, :, :100], tape.tokens[100:120])
    torch.testing.assert_close(part, whole[100:], rtol=2e-2, atol=2e-2)
    run = free_running(loaded.model, tape.kv[:, :, :100], tape.tokens[100], 4)
    assert run[0] == int(part[0].argmax())
    assert len(run) == 4


def test_keys_are_turned_back_to_where_they_were(loaded: LoadedModel) -> None:
    inv_freq = loaded.config.rope.inverse_frequencies()
    x = torch.randn(50, 2, loaded.config.head_dim)
    turned = turn_back(x, -torch.arange(50), inv_freq)
    torch.testing.assert_close(turn_back(turned, torch.arange(50), inv_freq), x)
    assert not torch.allclose(turned[1:], x[1:])


def test_the_root_of_moments_is_theirs_down_to_the_floor() -> None:
    a = torch.randn(3, 8, 8, dtype=torch.float64)
    moments = a @ a.mT + torch.eye(8)
    found = root(moments)
    scale = torch.linalg.eigvalsh(moments).mean(-1).view(-1, 1, 1)
    kept = torch.linalg.eigvalsh(found @ found)
    assert (kept > 0.0299).all()
    torch.testing.assert_close(kept, (torch.linalg.eigvalsh(moments / scale)).clamp(min=0.03))


def test_spans_are_even_and_within_bounds() -> None:
    assert spans_of(30, 192) == ((0, 6), (6, 12), (12, 18), (18, 24), (24, 30))
    assert spans_of(4, 32) == ((0, 4),)
    assert [b - a for a, b in spans_of(32, 1024)] == [1] * 32
    assert max(b - a for a, b in spans_of(7, 64)) <= 6


def fitted(loaded: LoadedModel, tape: Tape) -> Fit:
    queries = QueryMoments(loaded.model)
    record(loaded.model, tape.tokens, queries)
    roots = torch.stack([root(queries.moments), root(output_moments(loaded.model))], 1)
    found = samples(loaded.model, [tape])
    weights = torch.ones(roots.shape[:2], dtype=torch.float64)
    return fit(loaded.model, "tiny", found, roots, weights)


@pytest.mark.parametrize("columns", [(), ((128, 128),)])
def test_a_fine_step_changes_little_and_a_coarse_one_more(
    loaded: LoadedModel, tape: Tape, columns: tuple[tuple[int, int], ...]
) -> None:
    assert native is not None
    calibration = fitted(loaded, tape).calibration
    calibration.check()
    start = Tape(tape.tokens[:100], tape.kv[:, :, :100].contiguous())
    one = prompt(loaded.model, start, tape.tokens[100:132], free=24)
    measured = []
    for step in (0.02, 0.3):
        rung = Rung("near-basis" if columns else "near-channels", Quality.NEAR, step, columns)
        codec = make_codec(native, calibration, rung)
        found = measure(loaded.model, [one], codec, spans_for(calibration, rung), 1.0)
        measured.append(found)
        coded = through(codec, start.kv, spans_for(calibration, rung))
        assert torch.equal(coded.kv[:, :, :SINK_TOKENS], start.kv[:, :, :SINK_TOKENS])
    fine, coarse = measured
    assert fine.nmse_max < 1e-3 < coarse.nmse_max
    assert fine.kl < coarse.kl
    assert fine.ratio < coarse.ratio
    assert fine.positions == 32
    assert 0 <= fine.free_running_kl < coarse.free_running_kl


def test_steps_keep_the_worst_tensor_in_bounds_however_little_kl_says(
    loaded: LoadedModel, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native is not None
    bound = 0.02
    monkeypatch.setattr(rungs, "BOUNDS", dict.fromkeys(Quality, Bounds(1e3, 1e3, 1.0, bound)))
    start = Tape(tape.tokens[:100], tape.kv[:, :, :100].contiguous())
    one = prompt(loaded.model, start, tape.tokens[100:108])
    found = find_rungs(loaded.model, native, fitted(loaded, tape), [one], lambda said: None)
    for rung in found.header.rungs:
        codec = make_codec(native, found, rung)
        worst = worst_tensor([one], [through(codec, start.kv, spans_for(found, rung))])
        assert 0.1 * bound < worst < bound, rung.codec


def test_a_layer_that_matters_more_weighs_more(loaded: LoadedModel, tape: Tape) -> None:
    start = Tape(tape.tokens[:60], tape.kv[:, :, :60].contiguous())
    one = prompt(loaded.model, start, tape.tokens[60:80])
    found = samples(loaded.model, [tape])
    eye = torch.eye(loaded.config.head_dim, dtype=torch.float64)
    roots = eye.expand(loaded.config.layers, 2, loaded.config.kv_heads, *eye.shape).clone()
    said: list[str] = []
    weights = layer_weights(loaded.model, [one], found, roots, said.append)
    assert weights.shape == (loaded.config.layers, 2)
    assert (weights > 0).all()
    # In a metric twice as large the same noise is half the error.
    halved = layer_weights(loaded.model, [one], found, 2 * roots, said.append)
    assert ((halved / weights) < 0.8).all()
    assert len(said) == 4


def test_kl_is_zero_for_the_same_and_grows() -> None:
    a = torch.randn(5, 11).log_softmax(-1)
    b = (a + torch.randn(5, 11)).log_softmax(-1)
    assert (kl(a, a) == 0).all()
    assert (kl(a, b) > 0).all()


def test_a_calibration_is_written_measured_and_offered_only_if_good(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = make_tiny_model(tmp_path / "model", seed=3)
    learn, other = tmp_path / "a.txt", tmp_path / "b.txt"
    learn.write_text(texts.calibration_text()[:20000])
    other.write_text(texts.evaluation_texts()[0][:20000])
    said: list[str] = []
    out = tmp_path / "out" / "tiny.npz"
    made = calibrate(
        model, out, said.append,
        learn_text=learn, evaluation_text=other, model_identity="stated", sizes=TINY,
    )  # fmt: skip
    found = Calibration.load(out)
    assert found.digest == made.digest
    assert found.header.model_identity == "stated"
    assert [r.codec for r in found.header.rungs] == [
        "near-channels", "near-basis", "compact-basis", "tight-basis", "int8",
    ]  # fmt: skip
    for rung in found.header.rungs:
        assert rung.measured is not None
        assert rung.measured.positions == 64
        assert np.isfinite(rung.measured.kl)
    steps = [r.step for r in found.header.rungs[1:4]]
    assert steps == sorted(steps)
    assert sum("64 positions are fewer than 2000" in line for line in said) == 5


def test_what_cannot_be_calibrated_says_why(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(ConfigError, match="are needed"):
        calibrate(model, tmp_path / "o.npz", print, learn_text=short, sizes=TINY)
    with pytest.raises(ConfigError, match="cannot read text"):
        calibrate(model, tmp_path / "o.npz", print, learn_text=tmp_path / "none", sizes=TINY)
    hybrid = make_tiny_model(tmp_path / "h", recurrent=(1, 3))
    with pytest.raises(ConfigError, match="recurrent"):
        calibrate(hybrid, tmp_path / "o.npz", print, sizes=TINY)
