"""Second moments of KV and of what reads it: the metrics in which an error matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from local_engine.kv_calibration.tape import Tape
from local_engine.models.llama import LlamaModel
from local_engine.models.rope import rotate
from prfaas.codecs import SINK_TOKENS

FLOOR = 0.03
"""Least eigenvalue of a metric, relative to the mean: directions nobody read here may be read
elsewhere."""
RECENT_TOKENS = 64
_SAMPLES_PER_CHUNK = 64


class QueryMoments:
    """Second moments of queries as the keys see them, [layers, kv_heads, dim, dim]; a query hook.

    A logit depends on the distance of the two tokens: each query is turned by a distance drawn half
    from all it can see, half from the last `RECENT_TOKENS`.
    """

    def __init__(self, model: LlamaModel, seed: int = 0) -> None:
        config = model.config
        self._kv_heads = config.kv_heads
        self._inv_freq = config.rope.inverse_frequencies()
        self._rng = torch.Generator().manual_seed(seed)
        self._sums = torch.zeros(
            config.layers, config.kv_heads, config.head_dim, config.head_dim, dtype=torch.float64
        )
        self._counts = torch.zeros(config.layers, dtype=torch.float64)

    def __call__(self, layer: int, start: int, q: Tensor) -> None:
        picked = torch.randperm(len(q), generator=self._rng)[:_SAMPLES_PER_CHUNK]
        position = start + picked
        share = torch.rand(len(picked), generator=self._rng)
        reach = torch.where(
            torch.rand(len(picked), generator=self._rng) < 0.5,
            position,
            position.clamp(max=RECENT_TOKENS),
        )
        # q was rotated to its position: turning it back to the key's leaves the distance.
        turned = turn_back(q[picked].float(), position - (share * reach).long(), self._inv_freq)
        grouped = turned.view(len(picked), self._kv_heads, -1, q.shape[-1]).double()
        self._sums[layer] += torch.einsum("thgi,thgj->hij", grouped, grouped)
        self._counts[layer] += grouped.shape[0] * grouped.shape[2]

    @property
    def moments(self) -> Tensor:
        return self._sums / self._counts.clamp(min=1).view(-1, 1, 1, 1)


def turn_back(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """x [tokens, heads, dim] as it was before rope at `positions`."""
    angles = positions.float().unsqueeze(1) * inv_freq
    return rotate(x, angles.cos().unsqueeze(1), -angles.sin().unsqueeze(1))


def output_moments(model: LlamaModel) -> Tensor:
    """What a V vector does to the residual stream, [layers, kv_heads, dim, dim]."""
    config = model.config
    found = []
    for layer in range(config.layers):
        o = model.output_projection(layer).double().view(config.hidden_size, config.heads, -1)
        o = o.view(config.hidden_size, config.kv_heads, -1, config.head_dim)
        found.append(torch.einsum("ohgi,ohgj->hij", o, o))
    return torch.stack(found)


def root(moments: Tensor) -> Tensor:
    """Symmetric square roots of moments [..., dim, dim], normalised to a mean eigenvalue of 1."""
    values, vectors = torch.linalg.eigh(moments)
    values = values / values.mean(-1, keepdim=True).clamp(min=1e-30)
    values = values.clamp(min=FLOOR).sqrt()
    found: Tensor = vectors * values.unsqueeze(-2) @ vectors.mT
    return found


@dataclass(frozen=True, slots=True)
class Samples:
    """KV to learn from: K before rope and V of all tapes without sinks, float32
    [layers, k|v, tokens, kv_heads, dim], and the mean of each channel [layers, k|v, heads, dim].
    """

    values: Tensor
    mean: Tensor


def samples(model: LlamaModel, tapes: Sequence[Tape]) -> Samples:
    """All tapes' KV, as the codecs see it."""
    inv_freq = model.config.rope.inverse_frequencies()
    parts = []
    for tape in tapes:
        kv = tape.kv[:, :, SINK_TOKENS:].float()
        positions = torch.arange(SINK_TOKENS, tape.kv.shape[2])
        for layer in range(len(kv)):
            kv[layer, 0] = turn_back(kv[layer, 0], positions, inv_freq)
        parts.append(kv)
    values = torch.cat(parts, dim=2)
    return Samples(values, values.mean(2))
