"""One step at a time: order, batching, caching, preemption, slow clients, counters."""

from __future__ import annotations

import pytest

from local_engine.requests import FinishReason
from local_engine.testing import CHAIN_VOCAB, CoreHarness, chain_answer
from prfaas.errors import Cancelled, EngineUnavailable
from prfaas.limits import Limits


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * 7 + i * i) % CHAIN_VOCAB for i in range(count)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 64, 65])
def test_answers_are_right_around_block_and_chunk_boundaries(length: int) -> None:
    engine = CoreHarness()
    engine.submit("a", tokens(length), 6)
    engine.run()
    engine.assert_answered("a")
    engine.assert_empty()


def test_chunks_lie_on_an_absolute_grid_and_leave_the_last_token_to_decode() -> None:
    engine = CoreHarness(block_tokens=4, chunk_tokens=8)
    engine.submit("a", tokens(30))
    engine.run()
    assert engine.runner.chunks == [(0, 8), (8, 16), (16, 24), (24, 29)]
    engine.submit("b", tokens(13) + [1] * 20)
    engine.run()
    assert engine.runner.chunks[4:] == [(12, 16), (16, 24), (24, 32)]
    engine.assert_answered("a", "b")


def test_a_prompt_of_one_token_has_no_prefill() -> None:
    engine = CoreHarness()
    engine.submit("a", [5], 3)
    engine.run()
    assert engine.runner.chunks == []
    engine.assert_answered("a")


def test_running_sequences_decode_between_any_two_chunks() -> None:
    engine = CoreHarness()
    engine.submit("old", tokens(4), 100)
    engine.step(3)
    engine.submit("long", tokens(64, 1), 1)
    while engine.streams["long"].last is None:
        chunks, batches = len(engine.runner.chunks), len(engine.runner.batches)
        engine.step()
        assert len(engine.runner.chunks) - chunks <= 1
        assert len(engine.runner.batches) - batches == 1
    engine.assert_answered("long")


def test_requests_are_prefilled_first_come_first_served() -> None:
    engine = CoreHarness(max_batch=8)
    for i in range(5):
        engine.submit(f"r{i}", tokens(20 - 3 * i, i), 40)
    started = []
    while len(started) < 5:
        engine.step()
        started += [n for n, s in engine.streams.items() if s.events and n not in started]
    assert started == [f"r{i}" for i in range(5)]
    engine.run()
    engine.assert_answered(*started)


def test_the_batch_never_exceeds_its_bound_and_the_rest_wait_without_prefill() -> None:
    engine = CoreHarness(max_batch=2)
    for i in range(5):
        engine.submit(f"r{i}", tokens(10, i), 5)
    engine.run()
    assert max(engine.runner.batches) == 2
    engine.assert_answered(*engine.streams)
    engine.assert_empty()


def test_a_repeated_prompt_is_taken_from_the_cache_and_says_so() -> None:
    engine = CoreHarness()
    engine.submit("a", tokens(22))
    engine.run()
    engine.runner.chunks.clear()
    stream = engine.submit("b", tokens(22))
    engine.run()
    assert engine.runner.chunks == [(20, 21)]
    assert {event.cached_tokens for event in stream.events} == {20}
    assert engine.streams["a"].events[0].cached_tokens == 0
    engine.assert_answered("a", "b")


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    engine = CoreHarness()
    engine.submit("a", tokens(16), 1)
    engine.run()
    engine.runner.chunks.clear()
    stream = engine.submit("b", tokens(16))
    engine.run()
    assert stream.events[0].cached_tokens == 12
    assert engine.runner.chunks == [(12, 15)]
    engine.assert_answered("b")


def test_generated_tokens_are_cached_too() -> None:
    engine = CoreHarness()
    first = engine.submit("a", tokens(6), 12)
    engine.run()
    stream = engine.submit("b", tokens(6) + first.tokens)
    engine.run()
    # The last token drawn has no KV: 17 of 18 tokens, whole blocks only.
    assert stream.events[0].cached_tokens == 16
    engine.assert_answered("b")


def test_the_second_of_two_waiting_requests_hits_what_the_first_stores() -> None:
    engine = CoreHarness()
    shared = tokens(40)
    engine.submit("a", [*shared, 1])
    engine.submit("b", [*shared, 2, 3])
    engine.run()
    assert engine.streams["b"].events[0].cached_tokens == 40
    assert sum(end - start for start, end in engine.runner.chunks) == 40 + 1
    engine.assert_answered("a", "b")


def test_other_salts_share_nothing() -> None:
    engine = CoreHarness()
    for salt in ("", "x", "y"):
        engine.submit(f"s{salt}", tokens(20), salt=salt)
        engine.run()
        assert engine.streams[f"s{salt}"].events[0].cached_tokens == 0
    engine.submit("again", tokens(20), salt="x")
    engine.run()
    assert engine.streams["again"].events[0].cached_tokens == 16


def test_without_prefix_cache_nothing_is_kept() -> None:
    engine = CoreHarness(prefix_cache=False)
    for name in ("a", "b"):
        engine.submit(name, tokens(20))
        engine.run()
    assert engine.streams["b"].events[0].cached_tokens == 0
    assert engine.core.stats().cached_blocks == 0
    assert not engine.core.events.pending
    engine.assert_answered("a", "b")


def test_a_cleared_cache_gives_no_hits_and_running_sequences_do_not_refill_it() -> None:
    engine = CoreHarness()
    engine.submit("a", tokens(20))
    engine.run()
    engine.submit("running", tokens(20, 1), 30)
    engine.step(4)
    engine.core.clear_cache()
    engine.core.check()
    engine.run()
    assert engine.core.stats().cached_blocks == 0
    for name, seed in (("b", 0), ("c", 1)):
        engine.submit(name, tokens(20, seed))
        engine.run()
        assert engine.streams[name].events[0].cached_tokens == 0
    engine.assert_answered("a", "running", "b", "c")
    engine.assert_empty()


def test_stop_tokens_end_an_answer_with_themselves() -> None:
    right = chain_answer(tokens(9), 8)
    engine = CoreHarness()
    stream = engine.submit("a", tokens(9), 8, stop_token_ids=frozenset({right[3]}))
    engine.run()
    assert stream.tokens == right[:4]
    assert stream.last is not None
    assert stream.last.finish_reason is FinishReason.STOP
    full = engine.submit("b", tokens(9), 8)
    engine.run()
    assert full.last is not None
    assert full.last.finish_reason is FinishReason.LENGTH
    assert len(full.tokens) == 8


def test_one_token_answers() -> None:
    engine = CoreHarness()
    stream = engine.submit("a", tokens(9), 1)
    engine.run()
    assert len(stream.events) == 1
    assert stream.events[0].finish_reason is FinishReason.LENGTH
    engine.assert_answered("a")


def test_out_of_blocks_the_newest_is_preempted_and_every_answer_is_right() -> None:
    engine = CoreHarness(blocks=20, block_tokens=4, max_batch=4)
    for i in range(4):
        engine.submit(f"r{i}", tokens(14, i), 40)
    engine.run()
    assert engine.core.stats().preemptions > 0
    engine.assert_answered(*engine.streams)
    ended = {n: len(s.events) for n, s in engine.streams.items()}
    assert ended == {f"r{i}": 40 for i in range(4)}, "a preempted answer repeats or loses tokens"
    engine.assert_empty()


def test_the_oldest_is_never_slowed_by_preemption() -> None:
    engine = CoreHarness(blocks=20, block_tokens=4, max_batch=4, prefix_cache=False)
    for i in range(4):
        engine.submit(f"r{i}", tokens(14, i), 40)
    steps = 0
    while engine.streams["r0"].last is None:
        before = len(engine.streams["r0"].tokens)
        engine.step()
        if before:
            steps += 1
            assert len(engine.streams["r0"].tokens) == before + 1
    assert steps == 39
    engine.run()
    engine.assert_answered(*engine.streams)


def test_a_preempted_answer_keeps_what_it_said_about_its_cache() -> None:
    engine = CoreHarness(blocks=16, block_tokens=4, max_batch=2)
    engine.submit("seed", tokens(9, 1), 1)
    engine.run()
    engine.submit("old", tokens(20), 40)
    stream = engine.submit("new", tokens(9, 1), 24)
    engine.run()
    assert engine.core.stats().preemptions > 0
    assert {event.cached_tokens for event in stream.events} == {8}
    engine.assert_answered("old", "new")


def test_a_long_prompt_that_waits_for_blocks_is_not_overtaken() -> None:
    engine = CoreHarness(blocks=24, block_tokens=4, max_batch=4, prefix_cache=False)
    engine.submit("running", tokens(30), 20)
    engine.step(6)
    engine.submit("big", tokens(60, 1), 4)
    engine.submit("small", tokens(5, 2), 4)
    engine.run()
    big, small = engine.streams["big"], engine.streams["small"]
    engine.assert_answered("running", "big", "small")
    assert big.events[0].timings.ttft_s <= small.events[0].timings.ttft_s


@pytest.mark.parametrize("steps", range(12))
def test_cancel_at_any_step_frees_everything(steps: int) -> None:
    engine = CoreHarness()
    stream = engine.submit("a", tokens(40), 6)
    engine.submit("b", tokens(20, 1), 6)
    engine.step(steps)
    engine.core.cancel("a")
    engine.core.check()
    assert stream.last is not None
    assert isinstance(stream.last.error, Cancelled) or stream.last.finish_reason
    engine.run()
    engine.assert_answered("b")
    engine.assert_empty()
    engine.core.cancel("a")
    assert engine.core.stats().requests_finished.get("abort", 0) in (0, 1)


def test_ending_everything_tells_every_client() -> None:
    engine = CoreHarness()
    for i in range(3):
        engine.submit(f"r{i}", tokens(20, i), 9)
    engine.step(4)
    engine.core.fail_all(EngineUnavailable("over"))
    engine.core.check()
    for stream in engine.streams.values():
        assert stream.last is not None
        assert isinstance(stream.last.error, EngineUnavailable)
    engine.assert_empty()


def slow_harness(**settings: int) -> CoreHarness:
    engine = CoreHarness(
        limits=Limits(engine_event_queue=5, slow_client_timeout_s=30.0), **settings
    )
    engine.reads = False
    return engine


def test_a_client_that_does_not_read_pauses_only_itself() -> None:
    engine = slow_harness()
    engine.submit("slow", tokens(9), 20)
    engine.submit("fast", tokens(9, 1), 20)
    for _ in range(40):
        engine.step()
        engine.streams["fast"].read_all()
    engine.assert_answered("fast")
    assert len(engine.streams["slow"].events) == 5
    assert not engine.step()
    engine.streams["slow"].read_all()
    engine.reads = True
    engine.run()
    engine.assert_answered("slow")
    engine.assert_empty()


def test_a_client_that_never_reads_is_dropped_in_time() -> None:
    engine = slow_harness()
    stream = engine.submit("slow", tokens(9), 20)
    engine.step(30)
    engine.clock.advance(29.0)
    engine.step()
    assert stream.last is None
    engine.clock.advance(2.0)
    engine.step()
    assert stream.last is not None
    assert isinstance(stream.last.error, Cancelled)
    engine.assert_empty()


def test_a_slow_client_takes_neither_slot_nor_blocks_from_others() -> None:
    engine = slow_harness(blocks=10, block_tokens=4, max_batch=1)
    engine.submit("slow", tokens(16), 20)
    engine.step(10)
    engine.submit("other", tokens(24, 1), 8)
    for _ in range(30):
        engine.step()
        engine.streams["other"].read_all()
    engine.assert_answered("other")
    assert engine.core.stats().preemptions == 1
    engine.streams["slow"].read_all()
    engine.reads = True
    engine.run()
    engine.assert_answered("slow")


def test_a_paused_request_counts_as_waiting_and_can_be_cancelled() -> None:
    engine = slow_harness()
    engine.submit("slow", tokens(9), 20)
    engine.step(10)
    engine.core.cancel("slow")
    engine.core.check()
    engine.assert_empty()


def test_stats_tell_what_waits_and_what_runs() -> None:
    engine = CoreHarness(max_batch=2)
    engine.submit("a", tokens(10), 50)
    engine.step(3)
    engine.submit("b", tokens(30, 1), 50)
    engine.submit("c", [*tokens(10), 7, 7, 7], 50)
    before = engine.core.stats()
    assert (before.waiting, before.running) == (2, 1)
    # Of c, two whole blocks of four are cached; the last token belongs to decode.
    assert before.queue_tokens == 29 + 12 - 8
    assert before.context_tokens == 10 + len(engine.streams["a"].tokens)
    engine.step()
    assert engine.core.stats().queue_tokens == 29 - 8 + 12 - 8
    engine.run()
    stats = engine.core.stats()
    assert (stats.waiting, stats.running, stats.queue_tokens) == (0, 0, 0)
    assert stats.prompt_tokens == stats.prefix_query_tokens == 10 + 30 + 13
    assert stats.prefix_hit_tokens == 8
    assert stats.generated_tokens == 150
    assert stats.computed_tokens == 9 + 29 + 4
    assert dict(stats.requests_finished) == {"length": 3}


def test_timings_add_up() -> None:
    engine = CoreHarness()
    engine.runner.token_s, engine.runner.step_s = 0.01, 0.5
    engine.submit("first", tokens(9), 1)
    stream = engine.submit("a", tokens(17, 1), 2)
    engine.run()
    timings = stream.events[0].timings
    assert timings.queue_s == pytest.approx(0.08 + 0.5)
    assert timings.prefill_s == pytest.approx(0.16)
    assert timings.ttft_s == pytest.approx(timings.queue_s + timings.prefill_s + 0.5)
    assert engine.core.stats().decode_step_s == pytest.approx(0.5)


def test_the_warm_up_measures_and_leaves_nothing_behind() -> None:
    engine = CoreHarness()
    engine.runner.token_s, engine.runner.step_s = 0.002, 0.03
    engine.runner.strict = False  # It runs over KV that nobody has computed.
    engine.core.warm_up()
    engine.runner.strict = True
    engine.core.check()
    stats = engine.core.stats()
    assert stats.prefill_token_s == pytest.approx(0.002, rel=1e-3)
    assert stats.prefill_base_s == pytest.approx(0.0, abs=1e-4)
    assert stats.decode_step_s == pytest.approx(0.03)
    assert stats.free_blocks == stats.total_blocks
    assert stats.cached_blocks == stats.computed_tokens == stats.generated_tokens == 0
    assert not engine.core.events.pending
    engine.submit("a", tokens(20))
    engine.run()
    engine.assert_answered("a")


def test_an_idle_engine_times_itself_anew_and_ever_less_often() -> None:
    engine = CoreHarness(idle_measure_s=10.0)
    engine.runner.token_s, engine.runner.step_s = 0.01, 0.1
    engine.runner.strict = False
    engine.core.warm_up()
    slow = engine.core.stats().prefill_token_s
    engine.runner.token_s, engine.runner.step_s = 0.002, 0.03
    waits: list[float] = []
    since = engine.clock.now()
    while len(waits) < 9:
        engine.clock.advance(1.0)
        if engine.core.measure_if_due():
            waits.append(round(engine.clock.now() - since))
            since = engine.clock.now()
    assert waits == pytest.approx([10, 20, 40, 80, 160, 320, 320, 320, 320], abs=1)
    assert engine.core.stats().prefill_token_s < slow / 2, "the bad moment is forgotten"
    engine.runner.strict = True
    engine.core.check()
    engine.submit("a", tokens(20))
    assert not engine.core.measure_if_due(), "never while something is live"
    engine.run()
    engine.assert_answered("a")


def test_an_idle_measurement_leaves_the_cache_alone_where_there_is_room() -> None:
    engine = CoreHarness(idle_measure_s=10.0)
    engine.submit("a", tokens(20))
    engine.run()
    before = engine.core.cached_names()
    engine.clock.advance(11.0)
    engine.runner.strict = False
    assert engine.core.measure_if_due()
    assert engine.core.cached_names() == before
    assert not CoreHarness(idle_measure_s=0.0).core.measure_if_due()
