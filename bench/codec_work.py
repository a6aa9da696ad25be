"""What is slow about codecs and the same in every run: calibration, KV of prompts, answers."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from local_engine import kv_calibration
from local_engine.kv_calibration import texts
from local_engine.kv_calibration.evaluate import Prompt, measure, prompt, through
from local_engine.kv_calibration.run import Sizes, evaluation_tokens, learn, noise_floor
from local_engine.kv_calibration.tape import Tape, record
from local_engine.loader import LoadedModel
from prfaas.codecs import Calibration, Codec, base_name, gate, transform
from prfaas.codecs.calibration import Measured

SAME = 1e-3
"""Relative difference of two codecs' samples that comes of another order of additions."""
FOUND = Path(__file__).parents[1] / "build" / "bench-codecs"


class CodecWork:
    """One model's calibration and what codecs do to its answers, kept in files of `folder` (None:
    of this run only); nothing to close.

    Calibration is found again when the code that makes it has changed; what a codec does, when it
    makes something else of the first prompt, more than by rounding.
    """

    def __init__(
        self, loaded: LoadedModel, sizes: Sizes, folder: Path | None, say: Callable[[str], None]
    ) -> None:
        self._loaded = loaded
        self._sizes = sizes
        self._folder = folder
        self._say = say
        self._model = f"{loaded.identity.model_identity} {loaded.config!r}"

    @cached_property
    def calibration(self) -> Calibration:
        """Without what was measured."""
        text, sizes = texts.calibration_text(), replace(self._sizes, evaluate=())
        file = self._file("calibration", _sources(), repr(sizes), text, suffix="npz")
        if file is not None and file.is_file():
            return Calibration.load(file)
        start_s = time.process_time()
        made = learn(self._loaded, text, self._sizes, self._say)
        self._say(f"calibrated in {time.process_time() - start_s:.0f} s of CPU time")
        if file is not None:
            made.save(file)
            # Bases are written in half precision: what a file gives counts.
            made = Calibration.load(file)
        return made

    @cached_property
    def _tokens(self) -> list[list[int]]:
        return evaluation_tokens(self._loaded, texts.evaluation_texts(), self._sizes)

    def tape(self, number: int) -> Tape:
        """KV of an evaluation prompt."""
        tokens = self._tokens[number][: -self._sizes.following]
        file = self._file("tape", repr(tokens), suffix="npy")
        if file is not None and file.is_file():
            kv = torch.from_numpy(np.load(file)).view(torch.bfloat16)
            return Tape(tuple(tokens), kv)
        made = record(self._loaded.model, tokens)
        if file is not None:
            part = file.with_suffix(".part")
            with part.open("wb") as out:
                np.save(out, made.kv.view(torch.uint16).numpy())
            part.replace(file)
        return made

    @cached_property
    def prompts(self) -> list[Prompt]:
        """With their references; only made where something is still to be measured."""
        following = self._sizes.following
        return [
            prompt(
                self._loaded.model, self.tape(number), tokens[-following:], free=self._sizes.free
            )
            for number, tokens in enumerate(self._tokens)
        ]

    @cached_property
    def _floor(self) -> float:
        return self._kept("floor", (), lambda: noise_floor(self._loaded, self.prompts))

    def measured(self, codec: Codec, spans: Sequence[tuple[int, int]]) -> Measured:
        """What a codec does on all prompts; `spans`: layers of its tiles."""
        name = base_name(codec.name)

        def compute() -> dict[str, float]:
            start_s = time.process_time()
            found = measure(self._loaded.model, self.prompts, codec, spans, self._floor)
            self._say(f"{name} measured in {time.process_time() - start_s:.0f} s of CPU time")
            return asdict(found)

        key = (codec.name, self._sizes.free)
        return Measured(**self._kept(name, key, compute, self.sample(codec, spans)))

    def sample(self, codec: Codec, spans: Sequence[tuple[int, int]]) -> dict[str, float]:
        """What a codec makes of the first prompt: encoded bytes, and error of each tensor."""
        tape = self.tape(0)
        coded = through(codec, tape.kv, spans)
        error = (coded.kv.float() - tape.kv.float()).square().mean((2, 3, 4)).flatten()
        return {"nbytes": coded.nbytes} | {str(i): v for i, v in enumerate(error.tolist())}

    def _kept(
        self, what: str, key: tuple[object, ...], compute: Callable[[], Any],
        sample: dict[str, float] | None = None,
    ) -> Any:  # fmt: skip
        """What was found before, if it was of the same `sample`."""
        file = self._file(what, repr(key), repr(self._tokens), suffix="json")
        if file is None:
            return compute()
        if file.is_file():
            kept = json.loads(file.read_text())
            if sample is None or _same(kept["sample"], sample):
                return kept["found"]
        found = compute()
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"sample": sample, "found": found}))
        part.replace(file)
        return found

    def _file(self, what: str, *key: str, suffix: str) -> Path | None:
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.blake2b("\0".join((self._model, *key)).encode(), digest_size=12)
        return self._folder / f"{what}-{digest.hexdigest()}.{suffix}"


def _same(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether two samples differ by rounding at most."""
    return one.keys() == other.keys() and all(
        math.isclose(value, other[name], rel_tol=SAME) for name, value in one.items()
    )


def _sources() -> str:
    """What decides what a calibration is: how it is made, and what classes and codecs are."""
    folder = Path(kv_calibration.__path__[0])
    constants = [str(transform.DEAD), repr(gate.BOUNDS)]
    return "\0".join([*constants, *(file.read_text() for file in sorted(folder.glob("*.py")))])
