"""Remote KV: fetched, claimed late, imported in bounded steps; every other outcome is local."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from local_engine.testing import CHAIN_LAYOUT, CHAIN_VOCAB, CoreHarness, chain_kv
from prfaas.errors import Cancelled, PrefillUnavailable
from prfaas.testing.fake_port import FakePort
from prfaas_connect.port.messages import Abort, Fetch, FetchDone, Release

PARAMS = {"version": 1, "transfer_id": "t", "plan": [{"peer": "p", "instance": "i"}]}
TOKEN_BYTES = CHAIN_LAYOUT.token_bytes
CHUNK = 8


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * 7 + i * i) % CHAIN_VOCAB for i in range(count)]


class Decode(CoreHarness):
    """A decode engine whose agent is played by the test, with KV by the formula."""

    def __init__(self, *, verify_import: bool = False, **kwargs: Any) -> None:
        self.agent = FakePort(verify_import=verify_import)
        super().__init__(port=self.agent, **kwargs)

    def stage(self, fetch: Fetch, prompt: list[int], end: int, offset: int = 0) -> bytes:
        """Put the KV of [have, end) into staging, as it is on the grid of `CHUNK`."""
        parts = []
        for extent in CHAIN_LAYOUT.extents(fetch.have, end, CHUNK):
            rows = chain_kv(prompt, extent.layer)[:, extent.span.start : extent.span.end]
            at = offset + extent.offset
            data = np.frombuffer(rows.tobytes(), dtype=np.uint8)
            self.agent.staging_memory[at : at + extent.nbytes] = data
            parts.append(data.tobytes())
        return b"".join(parts)

    def done(self, fetch: Fetch, status: str, end: int = 0, **fields: Any) -> None:
        fields = {"reason": "", "staging_offset": 0, "chunk_tokens": CHUNK} | fields
        self.core.handle(FetchDone(fetch.session, status, token_end=end, **fields), b"")
        self.core.check()

    def fetch(self) -> Fetch:
        (fetch,) = self.agent.of(Fetch)
        return fetch


def test_a_fetch_asks_for_exactly_what_is_missing() -> None:
    engine = Decode()
    engine.submit("warm", tokens(22), 1)
    engine.run()
    engine.submit("a", tokens(40), params=PARAMS)
    ((fetch, blob),) = engine.agent.take(Fetch)
    assert (fetch.have, fetch.want, fetch.uncached) == (20, 39, 19)
    assert fetch.params == PARAMS
    assert np.frombuffer(blob, dtype="<i4").tolist() == tokens(40)
    assert not engine.step(), "it has nothing to do but to wait"


@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 17, 33, 40])
@pytest.mark.parametrize("cached", [0, 4, 12])
def test_staged_kv_is_decoded_from_without_any_prefill(length: int, cached: int) -> None:
    engine = Decode()
    if cached:
        engine.submit("warm", [*tokens(cached), 0], 1)
        engine.run()
    engine.runner.chunks.clear()
    stream = engine.submit("a", tokens(length), 6, params=PARAMS)
    if length - 1 <= min(cached, (length - 1) // 4 * 4):
        (fetch,) = engine.agent.of(Fetch)
        assert fetch.have == fetch.want
        return
    fetch = engine.fetch()
    engine.stage(fetch, tokens(length), fetch.want)
    engine.done(fetch, "staged", fetch.want)
    engine.run()
    engine.assert_answered("a")
    assert engine.runner.chunks == []
    event = stream.events[0]
    assert event.cached_tokens == length - 1
    assert event.imported_tokens == length - 1 - fetch.have
    assert (event.kv_status, event.kv_reason) == ("staged", "")
    assert engine.agent.of(Release) == [Release(fetch.session, "imported", length - 1 - fetch.have)]
    stats = engine.core.stats()
    assert dict(stats.kv_outcomes) == {"staged": 1}
    assert stats.imported_tokens == length - 1 - fetch.have
    engine.assert_empty()


def test_the_digest_is_that_of_the_bytes_read_back_in_extents_order() -> None:
    engine = Decode(verify_import=True)
    engine.submit("warm", tokens(9), 1)
    engine.run()
    engine.submit("a", tokens(30), params=PARAMS)
    fetch = engine.fetch()
    data = engine.stage(fetch, tokens(30), 29, offset=1000)
    engine.done(fetch, "staged", 29, staging_offset=1000)
    engine.run()
    (release,) = engine.agent.of(Release)
    assert release.digest == hashlib.blake2b(data, digest_size=16).hexdigest()
    engine.assert_answered("a")


def test_a_partial_transfer_is_kept_and_the_rest_computed_here() -> None:
    engine = Decode()
    stream = engine.submit("a", tokens(40), params=PARAMS)
    fetch = engine.fetch()
    engine.stage(fetch, tokens(40), 16)
    engine.done(fetch, "partial", 16, reason="peer_unavailable")
    engine.run()
    engine.assert_answered("a")
    assert engine.runner.chunks == [(16, 24), (24, 32), (32, 39)]
    event = stream.events[0]
    assert (event.cached_tokens, event.imported_tokens) == (16, 16)
    assert (event.kv_status, event.kv_reason) == ("partial", "peer_unavailable")
    assert dict(engine.core.stats().kv_outcomes) == {"peer_unavailable": 1}
    assert engine.agent.of(Release)[0].imported_tokens == 16


def test_local_prefills_here_with_what_is_cached() -> None:
    engine = Decode()
    engine.submit("warm", tokens(22), 1)
    engine.run()
    engine.runner.chunks.clear()
    stream = engine.submit("a", tokens(40), params=PARAMS)
    engine.done(engine.fetch(), "local", reason="peer_unavailable")
    engine.run()
    engine.assert_answered("a")
    assert engine.runner.chunks[0] == (20, 24)
    event = stream.events[0]
    assert (event.cached_tokens, event.imported_tokens) == (20, 0)
    assert (event.kv_status, event.kv_reason) == ("local", "peer_unavailable")
    assert engine.agent.of(Release) == []


def test_refused_ends_the_request_with_the_typed_error() -> None:
    engine = Decode()
    stream = engine.submit("a", tokens(40), params=PARAMS)
    engine.done(
        engine.fetch(), "refused", reason="fallback_budget", retry_after_s=7.0, message="no budget"
    )
    assert stream.last is not None
    error = stream.last.error
    assert isinstance(error, PrefillUnavailable)
    assert error.retry_after_s == 7.0
    assert error.message == "no budget"
    assert dict(engine.core.stats().kv_outcomes) == {"fallback_budget": 1}
    assert dict(engine.core.stats().requests_finished) == {"error": 1}
    engine.assert_empty()


def test_what_is_cached_is_told_and_waits_for_nobody() -> None:
    engine = Decode()
    engine.submit("warm", tokens(17), 1)
    engine.run()
    stream = engine.submit("a", tokens(17), params=PARAMS)
    engine.run()
    engine.assert_answered("a")
    (fetch,) = engine.agent.of(Fetch)
    assert (fetch.have, fetch.want, fetch.uncached) == (16, 16, 0)
    assert (stream.events[0].kv_status, stream.events[0].kv_reason) == ("local", "prefix_at_d")
    assert dict(engine.core.stats().kv_outcomes) == {"prefix_at_d": 1}
    engine.core.handle(FetchDone(fetch.session, "local", "prefix_at_d"), b"")
    engine.run()
    engine.assert_empty()


def test_without_port_or_agent_the_request_is_local_and_counted() -> None:
    engine = Decode()
    engine.agent.disconnect()
    for name, harness in (("a", engine), ("b", CoreHarness())):
        stream = harness.submit(name, tokens(20), params=PARAMS)
        harness.run()
        harness.assert_answered(name)
        assert (stream.events[0].kv_status, stream.events[0].kv_reason) == ("local", "no_agent")
        assert dict(harness.core.stats().kv_outcomes) == {"no_agent": 1}


def test_waiting_for_kv_blocks_nobody_and_holds_only_its_prefix() -> None:
    engine = Decode(blocks=24)
    engine.submit("warm", tokens(9), 1)
    engine.run()
    engine.submit("remote", tokens(60), params=PARAMS)
    stats = engine.core.stats()
    assert (stats.waiting, stats.waiting_kv, stats.queue_tokens) == (1, 1, 0)
    assert stats.free_blocks == 24 - 2
    engine.submit("local", tokens(60, 1))
    engine.run()
    engine.assert_answered("local")
    # What the remote request counts on was not evicted.
    fetch = engine.fetch()
    assert fetch.have == 8
    engine.stage(fetch, tokens(60), 59)
    engine.done(fetch, "staged", 59)
    engine.run()
    engine.assert_answered("remote")
    engine.assert_empty()


def test_an_import_overtakes_queued_prefills() -> None:
    engine = Decode()
    engine.submit("first", tokens(30, 1), 1)
    engine.submit("second", tokens(30, 2), 1)
    stream = engine.submit("remote", tokens(20), 1, params=PARAMS)
    fetch = engine.fetch()
    engine.stage(fetch, tokens(20), 19)
    engine.done(fetch, "staged", 19)
    engine.step()
    assert stream.last is not None
    assert engine.runner.chunks == [], "another's chunk came before its one row"
    engine.run()
    engine.assert_answered("first", "second", "remote")


def test_imports_do_not_starve_prefill() -> None:
    engine = Decode()
    engine.submit("local", tokens(4 * CHUNK + 1, 1), 1)
    for turn in range(4):
        engine.submit(f"remote{turn}", tokens(20, 10 + turn), 1, params=PARAMS)
        ((fetch, _),) = engine.agent.take(Fetch)
        engine.stage(fetch, tokens(20, 10 + turn), 19)
        engine.done(fetch, "staged", 19)
        engine.step(2)
    assert len(engine.runner.chunks) >= 3
    engine.run()
    engine.assert_answered("local", *(f"remote{turn}" for turn in range(4)))


def test_imports_are_bounded_per_step_and_others_decode_meanwhile() -> None:
    span = CHUNK * TOKEN_BYTES // 3
    engine = Decode(import_bytes_per_step=2 * span)
    engine.submit("running", tokens(5, 1), 100)
    engine.step(3)
    engine.submit("remote", tokens(42), 1, params=PARAMS)
    fetch = engine.fetch()
    engine.stage(fetch, tokens(42), 41)
    engine.done(fetch, "staged", 41)
    steps = 0
    while engine.streams["remote"].last is None:
        batches = len(engine.runner.batches)
        engine.step()
        steps += 1
        assert len(engine.runner.batches) == batches + 1
    # Five whole spans of three layers, two tensors a step; the last token's fit the eighth.
    assert steps == 8
    engine.assert_answered("remote")


def test_imported_blocks_are_cached_like_computed_ones() -> None:
    engine = Decode()
    engine.submit("a", tokens(40), 1, params=PARAMS)
    fetch = engine.fetch()
    engine.stage(fetch, tokens(40), 39)
    engine.done(fetch, "staged", 39)
    engine.run()
    (event,) = engine.core.events.take()
    # 39 imported tokens and the last prompt token: ten blocks of four.
    assert len(event.stored) == 10
    stream = engine.submit("b", tokens(40), 4)
    engine.run()
    assert stream.events[0].cached_tokens == 36
    engine.assert_answered("a", "b")


def test_an_import_waits_for_blocks_in_order_and_gets_them() -> None:
    engine = Decode(blocks=16, block_tokens=4, prefix_cache=False, max_batch=4)
    engine.submit("running", tokens(20), 20)
    engine.step(4)
    engine.submit("remote", tokens(40, 1), 4, params=PARAMS)
    fetch = engine.fetch()
    engine.stage(fetch, tokens(40, 1), 39)
    engine.done(fetch, "staged", 39)
    engine.submit("later", tokens(4, 2), 4)
    engine.run()
    engine.assert_answered("running", "remote", "later")
    remote, later = engine.streams["remote"].events[0], engine.streams["later"].events[0]
    assert remote.timings.ttft_s <= later.timings.ttft_s
    assert engine.core.stats().preemptions == 0
    engine.assert_empty()


@pytest.mark.parametrize(
    ("status", "end", "fields"),
    [
        ("staged", 39, {"staging_offset": 1 << 40}),
        ("staged", 39, {"staging_offset": -1}),
        ("staged", 39, {"chunk_tokens": 0}),
        ("partial", 0, {}),
        ("partial", 40, {}),
    ],
)
def test_a_contradictory_answer_is_released_and_the_request_is_local(
    status: str, end: int, fields: dict[str, int]
) -> None:
    engine = Decode()
    stream = engine.submit("a", tokens(40), params=PARAMS)
    fetch = engine.fetch()
    engine.done(fetch, status, end, **fields)
    engine.run()
    engine.assert_answered("a")
    assert engine.agent.of(Release) == [Release(fetch.session, "failed")]
    assert stream.events[0].kv_reason == "bad_staging"


def test_cancel_while_waiting_sends_abort_and_a_late_answer_is_ignored() -> None:
    engine = Decode()
    stream = engine.submit("a", tokens(40), params=PARAMS)
    fetch = engine.fetch()
    engine.core.cancel("a")
    assert engine.agent.of(Abort) == [Abort(fetch.session)]
    assert stream.last is not None
    assert isinstance(stream.last.error, Cancelled)
    engine.stage(fetch, tokens(40), 39)
    engine.done(fetch, "staged", 39)
    assert engine.agent.of(Release) == []
    assert not engine.step()
    engine.assert_empty()


@pytest.mark.parametrize("steps", range(4))
def test_cancel_after_staging_releases_once(steps: int) -> None:
    engine = Decode(import_bytes_per_step=1)
    engine.submit("a", tokens(40), params=PARAMS)
    fetch = engine.fetch()
    engine.stage(fetch, tokens(40), 39)
    engine.done(fetch, "staged", 39)
    engine.step(steps)
    engine.core.cancel("a")
    engine.core.check()
    assert engine.agent.of(Release) == [Release(fetch.session, "aborted")]
    assert engine.agent.of(Abort) == []
    engine.assert_empty()
    assert dict(engine.core.stats().kv_outcomes) == {"cancelled": 1}


@pytest.mark.parametrize("steps", [None, 0, 1, 4, 7, 30])
def test_a_lost_agent_leaves_requests_to_go_on_alone(steps: int | None) -> None:
    engine = Decode(import_bytes_per_step=1)
    stream = engine.submit("a", tokens(40), params=PARAMS)
    engine.submit("b", tokens(20, 1), params=PARAMS)
    fetch = engine.agent.of(Fetch)[0]
    if steps is not None:
        engine.stage(fetch, tokens(40), 39)
        engine.done(fetch, "staged", 39)
        engine.step(steps)
    engine.agent.disconnect()
    engine.core.disconnected()
    engine.core.check()
    engine.run()
    engine.assert_answered("a", "b")
    engine.assert_empty()
    # Three layers a chunk, one tensor a step: whole chunks are kept.
    if steps is None or steps < 30:
        kept = 0 if steps is None else steps // 3 * CHUNK
        event = stream.events[0]
        assert event.imported_tokens == event.cached_tokens == kept
        assert event.kv_reason == "agent_lost"
        assert engine.runner.chunks[0][0] == kept
    assert engine.core.stats().kv_outcomes["agent_lost"] == (2 if steps != 30 else 1)


def test_requests_survive_an_agent_that_vanishes_between_message_and_copy() -> None:
    engine = Decode()
    engine.submit("a", tokens(40), params=PARAMS)
    fetch = engine.fetch()
    engine.stage(fetch, tokens(40), 39)
    engine.done(fetch, "staged", 39)
    engine.agent.disconnect()
    engine.step()
    engine.core.disconnected()
    engine.run()
    engine.assert_answered("a")
    engine.assert_empty()


def test_a_preempted_import_is_released_and_recomputed() -> None:
    engine = Decode(blocks=14, block_tokens=4, import_bytes_per_step=1, prefix_cache=False)
    engine.submit("old", tokens(7), 40)
    engine.step(2)
    stream = engine.submit("remote", tokens(36, 1), 2, params=PARAMS)
    fetch = engine.fetch()
    engine.stage(fetch, tokens(36, 1), 35)
    engine.done(fetch, "staged", 35)
    while engine.core.stats().preemptions == 0:
        assert engine.step()
    assert engine.agent.of(Release) == [Release(fetch.session, "aborted")]
    engine.run()
    engine.assert_answered("old", "remote")
    event = stream.events[0]
    assert (event.kv_status, event.kv_reason) == ("local", "preempted")
    assert event.imported_tokens == 0


def test_a_request_preempted_after_its_import_says_what_is_true_then() -> None:
    preempted_between = 0
    for steps in range(2, 14):  # The older one needs its next block at one of these moments.
        engine = Decode(
            blocks=11, block_tokens=4, prefix_cache=False, import_bytes_per_step=3 * TOKEN_BYTES
        )
        engine.submit("old", tokens(7), 20)
        engine.step(steps)
        stream = engine.submit("remote", tokens(24, 1), 2, params=PARAMS)
        fetch = engine.fetch()
        engine.stage(fetch, tokens(24, 1), 23)
        engine.done(fetch, "staged", 23)
        engine.run()
        engine.assert_answered("old", "remote")
        event = stream.events[0]
        assert event.imported_tokens == event.cached_tokens
        preempted_between += event.kv_status == "staged" and event.imported_tokens == 0
    assert preempted_between > 0


def test_prefixes_held_by_waiting_requests_cannot_starve_the_oldest() -> None:
    engine = Decode(blocks=12, block_tokens=4)
    engine.submit("warm", tokens(33), 1)
    engine.run()
    engine.submit("first", tokens(44, 9), 2)
    engine.submit("waiter", [*tokens(32), *tokens(8, 5)], 2, params=PARAMS)
    fetch = engine.fetch()
    assert fetch.have == 32
    engine.run()
    engine.assert_answered("first")
    assert engine.agent.of(Abort) == [Abort(fetch.session)]
    engine.assert_answered("waiter")
    engine.assert_empty()


def staged(engine: Decode, fetch: Fetch, prompt: list[int]) -> None:
    engine.stage(fetch, prompt, fetch.want)
    engine.done(fetch, "staged", fetch.want)


def test_a_prefix_on_its_way_for_another_request_is_shipped_once() -> None:
    engine = Decode()
    shared = tokens(40)
    prompts = {name: [*shared, *tokens(5, seed)] for name, seed in (("a", 1), ("b", 2), ("c", 3))}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, params=PARAMS)
    ((first, _),) = engine.agent.take(Fetch)
    assert (first.have, first.want) == (0, 44)
    assert engine.core.stats().waiting_kv == 3
    staged(engine, first, prompts["a"])
    engine.run()
    engine.assert_answered("a")
    fetches = [fetch for fetch, _ in engine.agent.take(Fetch)]
    assert [(f.have, f.want) for f in fetches] == [(40, 44), (40, 44)]
    for fetch, name in zip(fetches, "bc", strict=True):
        staged(engine, fetch, prompts[name])
        engine.run()
    engine.assert_answered("b", "c")
    assert engine.streams["b"].events[0].imported_tokens == 4
    assert engine.streams["b"].events[0].cached_tokens == 44
    engine.assert_empty()


def test_a_prompt_that_is_mostly_its_own_is_fetched_at_once() -> None:
    engine = Decode()
    engine.submit("a", tokens(20), params=PARAMS)
    engine.submit("b", [*tokens(16), *tokens(30, 1)], params=PARAMS)
    engine.submit("c", tokens(20), salt="x", params=PARAMS)
    assert [f.have for f in engine.agent.of(Fetch)] == [0, 0, 0]


@pytest.mark.parametrize("outcome", ["local", "refused", "cancel", "partial", "lost"])
def test_who_waited_for_anothers_transfer_goes_on_whatever_becomes_of_it(outcome: str) -> None:
    engine = Decode()
    prompts = {"a": [*tokens(40), 1, 2], "b": [*tokens(40), 3, 4]}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, params=PARAMS)
    ((fetch, _),) = engine.agent.take(Fetch)
    match outcome:
        case "cancel":
            engine.core.cancel("a")
        case "lost":
            engine.agent.disconnect()
            engine.core.suspend_transfers()
            engine.core.disconnected()
        case "partial":
            engine.stage(fetch, prompts["a"], 16)
            engine.done(fetch, "partial", 16, reason="cut")
        case _:
            engine.done(fetch, outcome, reason="down")
    engine.run()
    if outcome == "lost":
        engine.assert_answered("a", "b")
        return
    ((second, _),) = engine.agent.take(Fetch)
    # What was imported, and a chunk that was computed meanwhile, is not asked for again.
    assert second.have == (24 if outcome == "partial" else 0)
    staged(engine, second, prompts["b"])
    engine.run()
    engine.assert_answered("b")
    engine.assert_empty()


@pytest.mark.parametrize("when", ["held", "asked again"])
def test_who_waits_for_anothers_transfer_can_be_cancelled(when: str) -> None:
    engine = Decode()
    engine.submit("a", [*tokens(40), 1], params=PARAMS)
    engine.submit("b", [*tokens(40), 2, 3, 4], params=PARAMS)
    ((fetch, _),) = engine.agent.take(Fetch)
    if when == "asked again":
        staged(engine, fetch, [*tokens(40), 1])
        engine.run()
    engine.core.cancel("b")
    engine.core.check()
    assert len(engine.agent.of(Abort)) == (when == "asked again")
    if when == "held":
        staged(engine, fetch, [*tokens(40), 1])
        engine.run()
    engine.assert_answered("a")
    assert engine.agent.of(Fetch) == [] or when == "asked again"
    engine.assert_empty()
