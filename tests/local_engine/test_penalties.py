"""Biases, penalties, cuts and log-probabilities are those of transformers' processors."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from local_engine.penalties import History, adjust, penalises
from local_engine.requests import SamplingParams
from local_engine.sampler import TokenDraw, draw_tokens, uniform

VOCAB = 1500
PROMPT = [5, 5, 7, 900, 11, 5, 1499]
ANSWER = [11, 42, 42, 42, 7, 0]


def logits(seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def history() -> History:
    made = History(PROMPT)
    made.add(ANSWER[:2])
    made.add(ANSWER[2:])
    return made


def processed(scores: Tensor, *processors: hf.LogitsProcessor) -> Tensor:
    """What transformers makes of the scores after prompt and answer."""
    out: Tensor = hf.LogitsProcessorList(processors)(
        torch.tensor([[*PROMPT, *ANSWER]]), scores[None].clone()
    )
    return out[0]


@pytest.mark.parametrize("penalty", [1.3, 0.5, 100.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    params = SamplingParams(9, repetition_penalty=penalty)
    want = processed(logits(), hf.RepetitionPenaltyLogitsProcessor(penalty))
    got = adjust(logits(), params, history())
    assert torch.equal(got, want)
    assert not torch.equal(got, logits())


BIAS = ((0, 5.0), (42, -100.0), (900, 0.5), (1499, 100.0))


def test_logit_bias_is_that_of_transformers() -> None:
    processor = hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS])
    got = adjust(logits(), SamplingParams(9, logit_bias=BIAS), None)
    assert torch.equal(got, processed(logits(), processor))


def test_bias_comes_before_the_repetition_penalty() -> None:
    want = processed(
        logits(),
        hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS]),
        hf.RepetitionPenaltyLogitsProcessor(1.7),
    )
    params = SamplingParams(9, logit_bias=BIAS, repetition_penalty=1.7)
    assert torch.equal(adjust(logits(), params, history()), want)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, -0.3), (1.5, 0.25)])
def test_presence_and_frequency_penalties_look_at_the_answer_alone(
    presence: float, frequency: float
) -> None:
    params = SamplingParams(9, presence_penalty=presence, frequency_penalty=frequency)
    want = logits()
    for token, count in Counter(ANSWER).items():
        want[token] -= presence + frequency * count
    torch.testing.assert_close(adjust(logits(), params, history()), want)


def test_nothing_asked_for_leaves_the_logits_themselves() -> None:
    row = logits()
    assert adjust(row, SamplingParams(9), None) is row
    assert not penalises(SamplingParams(9, logit_bias=BIAS, min_p=0.1))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert penalises(SamplingParams(9, **{name: 0.5}))


def test_adjusting_does_not_write_to_what_the_model_gave() -> None:
    row = logits()
    adjust(row, SamplingParams(9, logit_bias=BIAS, repetition_penalty=2.0), history())
    assert torch.equal(row, logits())


def warpers(params: SamplingParams) -> list[hf.LogitsProcessor]:
    """In the order in which `generate` of transformers has them."""
    found: list[hf.LogitsProcessor] = [hf.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        found.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        found.append(hf.MinPLogitsWarper(params.min_p))
    return found


@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 1.0), (0, 0.8), (50, 0.9)])
@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_tokens_are_drawn_from_what_the_warpers_of_transformers_leave(
    min_p: float, top_k: int, top_p: float, temperature: float
) -> None:
    params = SamplingParams(9, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    left = torch.softmax(processed(logits().double(), *warpers(params)), -1)
    ids = torch.arange(VOCAB)
    if top_k or top_p < 1:
        ids = logits().double().argsort(descending=True, stable=True)
    cumulative = left[ids].cumsum(-1)
    draws = [TokenDraw(params, 1, index) for index in range(40)]
    got = [one.token_id for one in draw_tokens(logits().expand(40, -1), draws)]
    points = [uniform(1, index) * float(cumulative[-1]) for index in range(40)]
    assert got == [int(ids[int((cumulative <= point).sum())]) for point in points]


def test_a_greedy_draw_takes_the_best_after_bias_and_penalties() -> None:
    best = int(logits().argmax())
    params = SamplingParams(9, temperature=0.0, logit_bias=((best, -100.0),))
    (drawn,) = draw_tokens(logits()[None], [TokenDraw(params, 0, 0)])
    assert drawn.token_id == int(logits().topk(2).indices[1])
    params = SamplingParams(9, temperature=0.0, presence_penalty=2.0)
    again = History([])
    seen = []
    for index in range(4):
        (drawn,) = draw_tokens(torch.tensor([[3.0, 2.5, 2.0, 1.5]]), [
            TokenDraw(params, 0, index, again),
        ])  # fmt: skip
        again.add([drawn.token_id])
        seen.append(drawn.token_id)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_the_model_whatever_the_draw(count: int) -> None:
    want = torch.log_softmax(logits(), -1)
    top = want.topk(count)
    changes = ({"temperature": 0.0}, {"temperature": 1.5, "seed": 3, "logit_bias": BIAS})
    for params in (SamplingParams(9, logprobs=count, **change) for change in changes):
        (drawn,) = draw_tokens(logits()[None], [TokenDraw(params, 1, 0)])
        assert drawn.logprobs is not None
        assert drawn.logprobs.logprob == float(want[drawn.token_id])
        assert drawn.logprobs.top == tuple(
            zip(top.indices.tolist(), top.values.tolist(), strict=True)
        )
    (drawn,) = draw_tokens(logits()[None], [TokenDraw(SamplingParams(9), 1, 0)])
    assert drawn.logprobs is None


def test_a_row_of_a_batch_is_adjusted_alone() -> None:
    rows = torch.stack([logits(seed) for seed in range(3)])
    plain = SamplingParams(9, temperature=0.0)
    banned = tuple((int(row.argmax()), -100.0) for row in rows)
    draws = [
        TokenDraw(plain, 0, 0),
        TokenDraw(SamplingParams(9, temperature=0.0, logit_bias=banned), 0, 0),
        TokenDraw(plain, 0, 0),
    ]
    got = [one.token_id for one in draw_tokens(rows, draws)]
    best = rows.argmax(-1).tolist()
    assert (got[0], got[2]) == (best[0], best[2])
    assert got[1] not in dict(banned)


def test_told_in_any_portions_a_history_is_the_same() -> None:
    for cut in range(len(ANSWER)):
        made = History(PROMPT)
        for part in (ANSWER[:cut], [], ANSWER[cut:]):
            made.add(part)
        assert made.answered == len(ANSWER)
        for got, want in itertools.zip_longest(made.answer(), history().answer()):
            assert torch.equal(got, want)
        assert sorted(made.seen().tolist()) == sorted({*PROMPT, *ANSWER})
