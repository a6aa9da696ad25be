"""The step of each codec: the largest at which text it was not fitted on stays within its class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from local_engine.kv_calibration.evaluate import Prompt, kl, through, worst_tensor
from local_engine.kv_calibration.fit import Fit
from local_engine.kv_calibration.tape import continued
from local_engine.models.llama import LlamaModel
from prfaas.codecs import Calibration, Quality
from prfaas.codecs.calibration import Rung
from prfaas.codecs.gate import BOUNDS
from prfaas.codecs.native import Native
from prfaas.codecs.transform import make_codec

ROUNDS = 3
TENSOR_SHARE = 0.8
"""Of the error that a class allows the worst tensor: from text to text it differs more than KL."""
NEAR_SHARE = 0.35
"""Within `near` it is the top-1 bound that is met last, not that of KL."""
COMPACT_SHARE = 0.42
"""What a model makes of its own answer is hurt more than what it makes of text."""
TIGHT_SHARE = 0.28
"""The coarser the step, the more it matters that other text is not what the basis was made for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A codec to find a step for. `share`: of the class's KL that it may use on the text it is
    tuned on, for other text is never quite the same.
    """

    codec: str
    quality: Quality
    basis: bool
    share: float


PLANS = (
    Plan("near-channels", Quality.NEAR, basis=False, share=NEAR_SHARE),
    Plan("near-basis", Quality.NEAR, basis=True, share=NEAR_SHARE),
    Plan("compact-basis", Quality.COMPACT, basis=True, share=COMPACT_SHARE),
    Plan("tight-basis", Quality.TIGHT, basis=True, share=TIGHT_SHARE),
)


def spans_for(calibration: Calibration, rung: Rung) -> tuple[tuple[int, int], ...]:
    """Layers of its tiles: a span of the basis, or one layer."""
    layers = len(calibration.header.layers)
    return calibration.header.spans if rung.columns else tuple((i, i + 1) for i in range(layers))


def find_rungs(
    model: LlamaModel,
    native: Native,
    found: Fit,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> Calibration:
    """The calibration with a rung for each plan. KL grows with the square of the step."""
    rungs: list[Rung] = []
    tensors = 2 * len(found.calibration.header.layers)
    for plan in PLANS:
        target = plan.share * BOUNDS[plan.quality].kl
        # Weights make the KL of a tensor the square of its error, a twelfth of the step's square.
        step = (12 * target / tensors) ** 0.5
        rung = Rung(plan.codec, plan.quality, step)
        for _ in range(ROUNDS):
            rung = replace(rung, step=step, columns=found.columns(step) if plan.basis else ())
            trial = replace(
                found.calibration, header=replace(found.calibration.header, rungs=(rung,))
            )
            codec = make_codec(native, trial, rung)
            spans = spans_for(trial, rung)
            coded = [through(codec, p.tape.kv, spans) for p in prompts]
            made = float(
                torch.cat([
                    kl(p.reference, continued(model, c.kv, p.following))
                    for p, c in zip(prompts, coded, strict=True)
                ]).mean()
            )  # fmt: skip
            ratio = sum(p.tape.kv.nbytes for p in prompts) / sum(c.nbytes for c in coded)
            worst = worst_tensor(prompts, coded)
            say(
                f"{plan.codec}: step {step:.4g}, KL {made:.3g}, worst tensor {worst:.3g}, "
                f"ratio {ratio:.2f}"
            )
            least = TENSOR_SHARE * BOUNDS[plan.quality].nmse_max / max(worst, 1e-9)
            factor = min(target / max(made, target / 100), least) ** 0.5
            if 0.93 < factor < 1.08:
                break
            step *= factor
        rungs.append(replace(rung, step=step, columns=found.columns(step) if plan.basis else ()))
    header = replace(found.calibration.header, rungs=tuple(rungs))
    return replace(found.calibration, header=header)
