"""Drawing tokens from logits: biases and penalties, temperature, top-k, top-p, min-p.

A draw depends on nothing but the logits, the seed, and the tokens before it and how many they are,
so it is the same in any batch and after a recomputation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from local_engine.penalties import History, adjust
from local_engine.requests import SamplingParams, TokenLogprobs

# Enough for nearly every top-p; sorting a whole vocabulary costs milliseconds.
_HEAD = 1024
# Below this a temperature only asks for overflow; it means greedy, as in other engines.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """One token to draw: its parameters, the request's seed, and its index in the answer.

    `history` is there if the parameters penalise what was said before.
    """

    params: SamplingParams
    seed: int
    index: int
    history: History | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and its log-probabilities if they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def draw_tokens(logits: Tensor, draws: Sequence[TokenDraw]) -> list[Drawn]:
    """One token for each row of logits [rows, vocab], fp32."""
    best: list[int] = logits.argmax(dim=-1).tolist()
    return [
        _drawn(row_logits, draw, row_best)
        for row_logits, draw, row_best in zip(logits, draws, best, strict=True)
    ]


def _drawn(logits: Tensor, draw: TokenDraw, best: int) -> Drawn:
    """`best`: the token of the highest logit."""
    adjusted = adjust(logits, draw.params, draw.history)
    if draw.params.temperature >= _GREEDY_BELOW:
        token = _draw(adjusted, draw)
    else:
        token = best if adjusted is logits else int(adjusted.argmax())
    wanted = draw.params.logprobs
    return Drawn(token, None if wanted is None else _logprobs(logits, token, wanted))


def _logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    logprobs = torch.log_softmax(logits.float(), -1)
    values, ids = torch.topk(logprobs, min(count, len(logprobs)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token]), top)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that every process and machine computes alike."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(logits: Tensor, draw: TokenDraw) -> int:
    params = draw.params
    scaled = logits.double() / params.temperature
    if params.top_k <= 0 and params.top_p >= 1.0:
        everything = torch.softmax(scaled, -1)
        if params.min_p > 0.0:
            everything[everything < params.min_p * everything.max()] = 0.0
        return _invert(everything.cumsum(-1), draw)
    probabilities, ids = _candidates(scaled, params)
    cumulative = probabilities.cumsum(-1)
    # The smallest set that reaches top_p: a token stays while those before it do not reach it.
    kept = max(1, int((cumulative - probabilities < params.top_p).sum()))
    if params.min_p > 0.0:
        kept = min(kept, int((probabilities >= params.min_p * probabilities[0]).sum()))
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
