"""Draws follow the parameters and the seed, and nothing else."""

from __future__ import annotations

import pytest
import torch

from local_engine.requests import SamplingParams
from local_engine.sampler import Drawn, TokenDraw, draw_tokens, uniform

VOCAB = 3000


def draw(logits: torch.Tensor, index: int = 0, seed: int = 1, **params: float) -> int:
    sampling = SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]
    (drawn,) = draw_tokens(logits[None], [TokenDraw(sampling, seed, index)])
    return drawn.token_id


def frequencies(logits: torch.Tensor, count: int = 3000, **params: float) -> torch.Tensor:
    sampling = SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]
    draws = [TokenDraw(sampling, 7, index) for index in range(count)]
    tokens = [drawn.token_id for drawn in draw_tokens(logits.expand(count, -1), draws)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)).double() / count


def peaked(vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_temperature_zero_and_nearly_zero_take_the_best_token() -> None:
    logits = peaked()
    best = int(logits.argmax())
    for temperature in (0.0, 1e-9, 0.01):
        assert draw(logits, temperature=temperature) == best


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    for temperature in (1.0, 0.5, 2.0):
        want = torch.softmax(logits.double() / temperature, -1)
        got = frequencies(logits, temperature=temperature)
        assert (got - want).abs().max() < 0.03


def test_top_k_leaves_the_k_best_with_their_proportions() -> None:
    logits = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1]).log()
    got = frequencies(logits, top_k=2)
    want = torch.tensor([0.0, 4 / 7, 0.0, 3 / 7, 0.0])
    assert (got - want).abs().max() < 0.03
    assert frequencies(logits, 50, top_k=1)[1] == 1.0


def test_top_p_leaves_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1]).log()
    got = frequencies(logits, top_p=0.6)
    want = torch.tensor([0.0, 4 / 7, 0.0, 3 / 7, 0.0])
    assert (got - want).abs().max() < 0.03
    assert (frequencies(logits, 200, top_p=0.84) > 0).tolist() == [False, True, True, True, False]
    assert frequencies(logits, 50, top_p=1e-9)[1] == 1.0


def test_top_p_counts_within_what_top_k_left() -> None:
    logits = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1]).log()
    got = frequencies(logits, top_k=3, top_p=0.8)
    assert (got > 0).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_the_short_cut_for_large_vocabularies_draws_what_a_full_sort_would(
    top_p: float, scale: float
) -> None:
    logits = peaked() * scale
    probabilities, order = torch.softmax(logits.double(), -1).sort(descending=True, stable=True)
    kept = int((probabilities.cumsum(-1) - probabilities < top_p).sum())
    cumulative = probabilities[:kept].cumsum(-1)
    for index in range(40):
        point = uniform(1, index) * float(cumulative[-1])
        want = int(order[int((cumulative <= point).sum())])
        assert draw(logits, index, top_p=top_p) == want


def test_a_draw_depends_on_seed_and_index_and_not_on_the_batch() -> None:
    logits = torch.stack([peaked(seed=i) for i in range(4)])
    params = SamplingParams(max_tokens=1, temperature=1.0)
    draws = [TokenDraw(params, seed=5, index=i) for i in range(4)]
    together = draw_tokens(logits, draws)
    alone = [draw_tokens(logits[i : i + 1], [draws[i]])[0] for i in range(4)]
    greedy = TokenDraw(SamplingParams(1, temperature=0.0), 0, 0)
    mixed = draw_tokens(logits[[2, 0]], [draws[2], greedy])
    assert together == alone
    assert mixed == [together[2], Drawn(int(logits[0].argmax()))]
    assert len({draw(logits[0], index=i) for i in range(30)}) > 3
    assert len({draw(logits[0], seed=i) for i in range(30)}) > 3


def test_uniform_numbers_are_uniform_and_pinned() -> None:
    values = [uniform(3, i) for i in range(4000)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    assert abs(sum(v * v for v in values) / len(values) - 1 / 3) < 0.02
    # The same on every machine, in every version: a seed promises a reproducible answer.
    assert uniform(1, 0) == 0.48055380340761744
    assert uniform(-(2**70), 1) != uniform(2**70, 1)
