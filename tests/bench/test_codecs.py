"""What a codec does is found once, and found again where it does something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from local_engine.loader import LoadedModel, load_model
from prfaas.codecs import Codec
from prfaas.codecs.native import native
from prfaas.testing.tinymodel import make_tiny_model

if native is None:
    pytest.skip("the C extension was not built", allow_module_level=True)

from bench import codec_work
from bench.codec_work import CodecWork
from bench.codecs import QUICK, over
from bench.harness import Samples
from local_engine.kv_calibration.run import Sizes
from prfaas.codecs.int8 import Int8Codec

TINY = Sizes((64,), (32,), (48, 64), 16, 1, 16, 8)
SPANS = tuple((i, i + 1) for i in range(4))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(make_tiny_model(tmp_path_factory.mktemp("model"), seed=3))


class Coarse(Int8Codec):
    """The same codec with other bytes."""

    def encode(self, raw: Any, shape: Any) -> bytes | None:
        return super().encode(np.bitwise_and(raw, 0xFC), shape)


def work(loaded: LoadedModel, folder: Path | None) -> CodecWork:
    return CodecWork(loaded, TINY, folder, lambda text: None)


def test_a_run_that_is_started_again_goes_on_where_it_was(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native is not None
    codec: Codec = Int8Codec(native)
    with torch.inference_mode():
        first = work(loaded, tmp_path).measured(codec, SPANS)
        assert first.positions == 32
        assert first == work(loaded, None).measured(codec, SPANS)

        def again(*arguments: object) -> None:
            raise AssertionError("it was measured already")

        monkeypatch.setattr(codec_work, "measure", again)
        monkeypatch.setattr(codec_work, "record", again)
        second = work(loaded, tmp_path)
        assert second.measured(codec, SPANS) == first
        assert torch.equal(second.tape(1).kv, second.tape(1).kv)
        with pytest.raises(AssertionError, match="already"):
            work(loaded, tmp_path).measured(Coarse(native), SPANS)


def test_a_quick_run_keeps_nothing(loaded: LoadedModel, tmp_path: Path) -> None:
    with torch.inference_mode():
        tape = work(loaded, None).tape(0)
        kept = work(loaded, tmp_path).tape(0)
    assert torch.equal(tape.kv, kept.kv)
    assert [file.suffix for file in tmp_path.iterdir()] == [".npy"]
    assert sum(QUICK.evaluate) < 2000


def test_quotients_are_those_of_the_rounds() -> None:
    value, unit, note = over(Samples((2.0, 9.0, 3.0)), Samples((1.0, 3.0, 3.0)), "x")
    assert (value, unit) == (2.0, "ratio")
    assert note == "x; 1 to 3 in 3 rounds"


def test_rounding_makes_no_other_codec_of_one() -> None:
    found = {"nbytes": 1000.0, "0": 1e-4, "1": 0.0}
    assert codec_work._same(found, {**found, "0": 1.0004e-4})
    assert not codec_work._same(found, {**found, "0": 1.01e-4})
    assert not codec_work._same(found, {**found, "nbytes": 1010.0})
    assert not codec_work._same(found, {"nbytes": 1000.0})
