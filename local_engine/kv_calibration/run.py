"""`prfaas calibrate-kv`: record, fit, tune, measure, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from local_engine.kv_calibration import texts
from local_engine.kv_calibration.evaluate import Prompt, measure, prompt, top1_floor
from local_engine.kv_calibration.fit import fit
from local_engine.kv_calibration.moments import QueryMoments, output_moments, root, samples
from local_engine.kv_calibration.rungs import find_rungs, spans_for
from local_engine.kv_calibration.tape import Tape, record
from local_engine.kv_calibration.weights import layer_weights
from local_engine.loader import LoadedModel, load_model
from local_engine.models.llama import LlamaModel
from prfaas.codecs import Calibration, Codec
from prfaas.codecs.calibration import Rung
from prfaas.codecs.gate import misses
from prfaas.codecs.int8 import Int8Codec
from prfaas.codecs.native import native
from prfaas.codecs.transform import make_codec
from prfaas.errors import ConfigError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much text, in tokens: prompts to learn from, to tune steps on and to evaluate on;
    `following` positions are measured behind each of the latter two, and `free` greedy ones behind
    the last. Noise is measured on the beginning of the first `noise_prompts` of those to tune on.
    """

    learn: tuple[int, ...]
    tune: tuple[int, ...]
    evaluate: tuple[int, ...]
    following: int = 200
    noise_prompts: int = 2
    noise_tokens: int = 512
    noise_positions: int = 160
    free: int = 64


FULL = Sizes((2048,) * 6, (1024,) * 3, (512, 1024, 640, 768, 1536, 512, 2048, 896, 4000, 512, 1280))


def calibrate(
    model_path: Path,
    out: Path,
    say: Say,
    *,
    learn_text: Path | None = None,
    evaluation_text: Path | None = None,
    model_identity: str = "",
    sizes: Sizes = FULL,
) -> Calibration:
    """Calibrate a model and write `out`. `model_identity`: what its engines state, if they do.
    Raises ConfigError for what is not to be had.
    """
    if native is None:
        raise ConfigError("calibrated codecs need the C extension, which was not built here")
    loaded = load_model(model_path)
    if loaded.config.recurrent is not None:
        raise ConfigError("models with recurrent layers cannot be calibrated in this version")
    with torch.inference_mode():
        text = texts.read_text(learn_text) if learn_text else texts.calibration_text()
        calibration = learn(loaded, text, sizes, say)
        others = [texts.read_text(evaluation_text)] if evaluation_text else texts.evaluation_texts()
        calibration = evaluated(loaded, calibration, others, sizes, say)
    if model_identity:
        header = replace(calibration.header, model_identity=model_identity)
        calibration = replace(calibration, header=header)
    calibration.save(out)
    say(f"written: {out} (digest {calibration.digest})")
    return calibration


def learn(loaded: LoadedModel, text: str, sizes: Sizes, say: Say) -> Calibration:
    """Bases, weights and steps from calibration text."""
    assert native is not None
    model = loaded.model
    ids = loaded.tokenizer.encode(text)
    want = sum(sizes.learn) + sum(n + sizes.following for n in sizes.tune)
    if len(ids) < want:
        raise ConfigError(f"calibration text has {len(ids)} tokens, {want} are needed")
    queries = QueryMoments(model)
    pieces = _spread(ids, [*sizes.learn, *(n + sizes.following for n in sizes.tune)])
    tapes = [record(model, piece, queries) for piece in pieces[: len(sizes.learn)]]
    say(f"recorded {sum(sizes.learn)} tokens to learn from")
    tune = [_prompt(model, piece, sizes.following) for piece in pieces[len(sizes.learn) :]]
    roots = torch.stack([root(queries.moments), root(output_moments(model))], 1)
    found = samples(model, tapes)
    short = [_beginning(model, p, sizes) for p in tune[: sizes.noise_prompts]]
    weights = layer_weights(model, short, found, roots, say)
    fitted = fit(model, loaded.identity.model_identity, found, roots, weights)
    return find_rungs(model, native, fitted, tune, say)


def evaluated(
    loaded: LoadedModel, calibration: Calibration, sources: Sequence[str],
    sizes: Sizes, say: Say,
) -> Calibration:  # fmt: skip
    """The calibration with what its rungs do to text of other sources, and int8 too."""
    assert native is not None
    model = loaded.model
    prompts = evaluation_prompts(loaded, sources, sizes)
    floor = noise_floor(loaded, prompts)
    say(f"{len(prompts)} prompts to measure on; bf16 and fp32 KV agree in {floor:.2%}")
    measured = {}
    plain = Rung(Int8Codec.name, Int8Codec.quality, step=1.0)
    int8 = Int8Codec(native)
    header = replace(calibration.header, rungs=(*calibration.header.rungs, plain))
    calibration = replace(calibration, header=header)
    for rung in header.rungs:
        codec: Codec = make_codec(native, calibration, rung) if rung is not plain else int8
        found = measure(model, prompts, codec, spans_for(calibration, rung), floor)
        measured[rung.codec] = found
        wrong = misses(rung.quality, found)
        say(
            f"{rung.codec}: ratio {found.ratio:.2f}, KL {found.kl:.3g} (p99 {found.kl_p99:.3g}, "
            f"free running {found.free_running_kl:.3g}), top-1 {found.top1:.2%}, worst tensor "
            f"{found.nmse_max:.3g}: " + ("; ".join(wrong) + ": not offered" if wrong else "ok")
        )
    return calibration.with_measured(measured)


def evaluation_prompts(loaded: LoadedModel, sources: Sequence[str], sizes: Sizes) -> list[Prompt]:
    """Prompts of these lengths, from one source after the other."""
    return [
        _prompt(loaded.model, ids, sizes.following, free=sizes.free)
        for ids in evaluation_tokens(loaded, sources, sizes)
    ]


def evaluation_tokens(loaded: LoadedModel, sources: Sequence[str], sizes: Sizes) -> list[list[int]]:
    """Tokens of each prompt and of what follows it."""
    found, starts = [], [0] * len(sources)
    for index, length in enumerate(sizes.evaluate):
        at = index % len(sources)
        found.append(texts.cut(loaded.tokenizer, sources[at], length + sizes.following, starts[at]))
        starts[at] += length + sizes.following
    return found


def noise_floor(loaded: LoadedModel, prompts: Sequence[Prompt]) -> float:
    """Top-1 agreement of bf16 and fp32 KV."""
    exact = [record(loaded.model, p.tape.tokens, dtype=torch.float32).kv for p in prompts]
    return top1_floor(loaded.model, list(zip(prompts, exact, strict=True)))


def _prompt(model: LlamaModel, ids: Sequence[int], following: int, *, free: int = 0) -> Prompt:
    """All but the last `following` tokens, and those behind them."""
    return prompt(model, record(model, ids[:-following]), ids[-following:], free=free)


def _beginning(model: LlamaModel, whole: Prompt, sizes: Sizes) -> Prompt:
    """The same with so little prompt that a step behind it costs little."""
    tape = whole.tape
    tokens = min(sizes.noise_tokens, len(tape.tokens) // 2)
    start = Tape(tape.tokens[:tokens], tape.kv[:, :, :tokens].contiguous())
    return prompt(model, start, tape.tokens[tokens : tokens + sizes.noise_positions])


def _spread(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Pieces of these sizes, apart from each other, from all over the text."""
    gap = (len(ids) - sum(sizes)) // len(sizes)
    found, at = [], 0
    for size in sizes:
        found.append(list(ids[at : at + size]))
        at += size + gap
    return found
