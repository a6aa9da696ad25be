"""How much an error in each layer's K or V matters: noise of a known size, and the KL it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from local_engine.kv_calibration.evaluate import Prompt, mean_kl
from local_engine.kv_calibration.moments import Samples, turn_back
from local_engine.kv_calibration.tape import Tape
from local_engine.models.llama import LlamaModel
from prfaas.codecs import SINK_TOKENS

NOISE_SHARE = 0.25
"""Deviation of the noise over that of the tensor: KL well above rounding, below saturation."""
_MOST_RATIO = 8.0


def layer_weights(
    model: LlamaModel,
    prompts: Sequence[Prompt],
    found: Samples,
    roots: Tensor,
    say: Callable[[str], None],
) -> Tensor:
    """Weights [layers, k|v]: KL is about (weight * error in the metric) ** 2, summed over tensors.

    KL is quadratic in small errors, so one size of noise is enough; a single estimate is rough, and
    weights far from the others of their kind are taken for noise.
    """
    deviation = found.values.var(2).mean((-1, -2)).sqrt()
    inverse = torch.linalg.inv(roots).float()
    slopes = torch.zeros(roots.shape[:2], dtype=torch.float64)
    for part in (0, 1):
        for layer in range(len(roots)):
            sigma = NOISE_SHARE * float(deviation[layer, part])
            made = mean_kl(model, prompts, _noisy(model, layer, part, sigma, inverse[layer, part]))
            slopes[layer, part] = max(made, 1e-9) / sigma**2
        say(f"measured what {'VK'[part == 0]} of each layer is worth")
    middle = slopes.log().median(0).values.exp()
    return slopes.clamp(middle / _MOST_RATIO**2, middle * _MOST_RATIO**2).sqrt()


def _noisy(
    model: LlamaModel, layer: int, part: int, sigma: float, inverse: Tensor
) -> Callable[[Tape], Tensor]:
    """KV with noise that is white in the metric, in one tensor, behind the sinks."""

    def change(tape: Tape) -> Tensor:
        rng = torch.Generator().manual_seed(2 * layer + part)
        kv = tape.kv.clone()
        tokens, heads, dim = kv.shape[2:]
        noise = torch.randn(tokens, heads, dim, generator=rng) * sigma
        noise = torch.einsum("thd,hde->the", noise, inverse)
        noise[:SINK_TOKENS] = 0
        if part == 0:  # as K would be rotated: turned by its position
            positions = -torch.arange(tokens)
            noise = turn_back(noise, positions, model.config.rope.inverse_frequencies())
        kv[layer, part] = (kv[layer, part].float() + noise).to(kv.dtype)
        return kv

    return change
