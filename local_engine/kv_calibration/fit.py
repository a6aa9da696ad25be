"""Bases, scales and weights of layers, out of what was recorded."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from local_engine.kv_calibration.moments import Samples
from local_engine.models.llama import LlamaModel
from prfaas.codecs import Calibration
from prfaas.codecs.calibration import VERSION, Floats, Header

MAX_SPAN = 6
MAX_WIDTH = 1536
"""Widest basis: products grow with the width, and take most of the time as it is."""
LEAST_SPREAD = 0.35
"""Columns whose deviation is below this share of the step are dropped: they would be zeros."""


def spans_of(layers: int, width: int) -> tuple[tuple[int, int], ...]:
    """Ranges of layers that share a basis, as even as can be."""
    most = max(1, min(MAX_SPAN, MAX_WIDTH // width))
    count = -(-layers // most)
    edges = [round(i * layers / count) for i in range(count + 1)]
    return tuple(itertools.pairwise(edges))


@dataclass(frozen=True, slots=True)
class Fit:
    """A calibration without rungs, and the deviation of each column of each basis."""

    calibration: Calibration
    deviations: tuple[Floats, ...]

    def columns(self, step: float) -> tuple[tuple[int, int], ...]:
        """Columns worth keeping at a step, of K and V of each span."""
        kept = [max(1, int((d > LEAST_SPREAD * step).sum())) for d in self.deviations]
        return tuple(zip(kept[::2], kept[1::2], strict=True))


def fit(model: LlamaModel, identity: str, found: Samples, roots: Tensor, weights: Tensor) -> Fit:
    """`roots` [layers, k|v, heads, dim, dim] of the metrics; `weights` [layers, k|v]."""
    config = model.config
    width = config.kv_heads * config.head_dim
    metric = (roots * weights.view(*weights.shape, 1, 1, 1)).float()
    spans = spans_of(config.layers, width)
    bases, deviations = [], []
    for low, high in spans:
        for part in (0, 1):
            rows = []
            for layer in range(low, high):
                x = found.values[layer, part] - found.mean[layer, part]
                rows.append(torch.einsum("thd,hde->the", x, metric[layer, part]).flatten(1))
            x = torch.cat(rows, dim=1)
            variance, vectors = torch.linalg.eigh(x.mT.double() @ x.double() / len(x))
            deviations.append(variance.flip(0).clamp(min=0).sqrt().float().numpy())
            bases.append(np.ascontiguousarray(vectors.flip(1).float().numpy()))
    # What an error in one channel alone does: the length of its row.
    scale = metric.square().sum(-1).sqrt()
    header = Header(
        version=VERSION,
        model_identity=identity,
        layers=tuple(range(config.layers)),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        spans=spans,
        rungs=(),
    )
    calibration = Calibration(
        header,
        inv_freq=config.rope.inverse_frequencies().numpy(),
        mean=found.mean.flatten(2).numpy(),
        scale=scale.flatten(2).numpy(),
        metric=metric.numpy(),
        basis=tuple(b.astype(np.float16).astype(np.float32) for b in bases),
    )
    return Fit(calibration, tuple(deviations))
