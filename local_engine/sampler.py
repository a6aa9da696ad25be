"""Drawing tokens from logits: greedy, temperature, top-k, top-p.

A draw depends on nothing but the logits, the seed and the token's index in the answer, so it is the
same in any batch and after a recomputation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from local_engine.requests import SamplingParams

# Enough for nearly every top-p; sorting a whole vocabulary costs milliseconds.
_HEAD = 1024
# Below this a temperature only asks for overflow; it means greedy, as in other engines.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """One token to draw: its parameters, the request's seed, and its index in the answer."""

    params: SamplingParams
    seed: int
    index: int


def draw_tokens(logits: Tensor, draws: Sequence[TokenDraw]) -> list[int]:
    """One token for each row of logits [rows, vocab], fp32."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if draw.params.temperature >= _GREEDY_BELOW:
            tokens[row] = _draw(logits[row], draw)
    return tokens


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that every process and machine computes alike."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(logits: Tensor, draw: TokenDraw) -> int:
    params = draw.params
    scaled = logits.double() / params.temperature
    if params.top_k <= 0 and params.top_p >= 1.0:
        return _invert(torch.softmax(scaled, -1).cumsum(-1), draw)
    probabilities, ids = _candidates(scaled, params)
    cumulative = probabilities.cumsum(-1)
    # The smallest set that reaches top_p: a token stays while those before it do not reach it.
    kept = max(1, int((cumulative - probabilities < params.top_p).sum()))
    return int(ids[_invert(cumulative[:kept], draw)])


def _candidates(scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Probabilities, descending, and ids of every token that top-k and top-p can leave over."""
    vocab = scaled.shape[-1]
    if params.top_k > 0:
        values, ids = torch.topk(scaled, min(params.top_k, vocab))
        return torch.softmax(values, -1), ids
    if vocab > _HEAD:
        values, ids = torch.topk(scaled, _HEAD)
        probabilities = (values - scaled.logsumexp(-1)).exp()
        if float(probabilities.sum()) >= params.top_p:
            return probabilities, ids
    values, ids = torch.sort(scaled, descending=True, stable=True)
    return torch.softmax(values, -1), ids


def _invert(cumulative: Tensor, draw: TokenDraw) -> int:
    """Index of the first entry whose cumulative weight exceeds u times the total."""
    point = cumulative[-1:] * uniform(draw.seed, draw.index)
    index = int(torch.searchsorted(cumulative, point, right=True))
    return min(index, cumulative.shape[-1] - 1)
