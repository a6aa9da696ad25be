"""What an answer tells its client, and when it ends."""

from __future__ import annotations

import pytest

from local_engine.answer import Answer
from local_engine.kv.pool import KvPool
from local_engine.requests import EngineRequest, FinishReason, RequestTimings, SamplingParams
from local_engine.testing import CHAIN_LAYOUT, ListStream
from prfaas.testing.clock import ManualClock


def make(max_tokens: int = 3, max_context: int = 100, **sampling: object) -> Answer:
    params = SamplingParams(max_tokens, **sampling)  # type: ignore[arg-type]
    return Answer(
        EngineRequest("r", (1, 2, 3), params), 0, 77, KvPool(CHAIN_LAYOUT, 8, 4),
        ListStream(10, ManualClock()), 10.0,
        eos_ids=frozenset({50}), max_context=max_context, shares=True,
    )  # fmt: skip


def after(answer: Answer, *tokens: int) -> FinishReason | None:
    answer.tokens.extend(tokens)
    return answer.finish_reason()


def test_it_ends_at_max_tokens() -> None:
    answer = make(2)
    assert after(answer, 4) is None
    assert after(answer, 4) is FinishReason.LENGTH


def test_it_ends_where_the_context_ends() -> None:
    answer = make(5, max_context=4)
    assert after(answer, 4) is FinishReason.LENGTH


def test_it_ends_at_a_stop_or_end_token_even_as_its_last() -> None:
    assert after(make(), 50) is FinishReason.STOP
    assert after(make(1), 50) is FinishReason.STOP
    assert after(make(stop_token_ids=frozenset({9})), 9) is FinishReason.STOP
    assert after(make(ignore_eos=True), 50) is None
    assert after(make(ignore_eos=True, stop_token_ids=frozenset({9})), 9) is FinishReason.STOP


def test_draws_are_numbered_by_tokens_drawn_whatever_is_recomputed() -> None:
    answer = make()
    assert (answer.next_draw().seed, answer.next_draw().index) == (77, 0)
    answer.tokens.extend([5, 6])
    answer.drop_blocks()
    assert answer.next_draw().index == 2


def test_phases_it_has_not_been_through_take_no_time() -> None:
    assert make().event((1,)).timings == RequestTimings()


def test_times_are_those_between_its_moments() -> None:
    answer = make()
    answer.started(10.5)
    answer.started(99.0)
    answer.fetched_at, answer.staged_at, answer.imported_at = 10.5, 11.0, 11.25
    answer.prefilled(12.0, 13.0)
    answer.prefilled(14.0, 16.0)
    answer.first_token_at = 17.0
    timings = answer.event((1,)).timings
    assert timings == pytest.approx(
        RequestTimings(queue_s=0.5, kv_wait_s=0.5, import_s=0.25, prefill_s=4.0, ttft_s=7.0)
    )
