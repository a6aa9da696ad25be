"""An engine with states: reuse, preemption, export and import are exact, no slot is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from local_engine.loader import LoadedModel, load_model
from local_engine.runner import TorchRunner
from local_engine.testing import (
    CHAIN_VOCAB,
    HYBRID_CHAIN_LAYOUT,
    CoreHarness,
    LoopbackAgents,
    chain_kv,
    chain_state,
)
from prfaas.testing.fake_port import FakePort
from prfaas_connect.port.messages import Fetch, FetchDone, PrefillEnd, PrefillStart, Record, Release

LAYOUT = HYBRID_CHAIN_LAYOUT
CHUNK = 8
PARAMS = {"version": 1, "transfer_id": "t", "plan": [{"peer": "p", "instance": "i"}]}


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * 7 + i * i) % CHAIN_VOCAB for i in range(count)]


def harness(**kwargs: object) -> CoreHarness:
    return CoreHarness(layout=LAYOUT, **kwargs)  # type: ignore[arg-type]


def right(prompt: Sequence[int], layer: int, start: int, end: int) -> bytes:
    """What tokens [start, end) leave in a layer, or the state after them."""
    if layer in LAYOUT.groups[1].layers:
        return chain_state(prompt[:end], LAYOUT.groups[1].layers.index(layer)).tobytes()
    index = LAYOUT.groups[0].layers.index(layer)
    return chain_kv(prompt, index)[:, start:end].tobytes()


# --- reuse ---


def test_a_prefix_is_gone_on_with_from_a_chunk_end() -> None:
    engine = harness()
    for name, length in (("a", 30), ("b", 30), ("c", 45)):
        engine.submit(name, tokens(length), 4)
        engine.run()
    engine.assert_answered("a", "b", "c")
    assert [engine.streams[n].events[0].cached_tokens for n in "abc"] == [0, 24, 24]
    engine.assert_empty()


def test_what_was_decoded_is_kept_too() -> None:
    engine = harness()
    stream = engine.submit("a", tokens(12), 30)
    engine.run()
    engine.submit("b", [*tokens(12), *stream.tokens, 5], 4)
    engine.run()
    engine.assert_answered("a", "b")
    assert engine.streams["b"].events[0].cached_tokens == 40
    engine.assert_empty()


def test_the_index_shows_only_prefixes_that_can_be_gone_on_with() -> None:
    engine = harness(state_slots=3)
    for seed in range(4):
        engine.submit(f"r{seed}", tokens(30, seed), 1)
        engine.run()
        # Blocks of 4: a kept state after 8, 16 or 24 tokens makes so many of them visible.
        assert len(engine.core.cached_names()) % 2 == 0
    # Three slots keep the states of the last prompt, which ran in one of them.
    stats = engine.core.stats()
    assert stats.kept_states == 2
    assert len(engine.core.cached_names()) == 6
    engine.submit("again", tokens(30, 3), 1)
    engine.run()
    assert engine.streams["again"].events[0].cached_tokens == 24
    engine.submit("gone", tokens(30, 0), 1)
    engine.run()
    assert engine.streams["gone"].events[0].cached_tokens == 0


def test_blocks_of_another_grid_than_chunks_keep_states_where_both_end() -> None:
    engine = harness(block_tokens=3)
    for name in "ab":
        engine.submit(name, tokens(60), 2)
        engine.run()
    engine.assert_answered("a", "b")
    assert engine.streams["b"].events[0].cached_tokens == 48
    engine.assert_empty()


def test_a_cleared_cache_gives_no_state_to_anybody() -> None:
    engine = harness()
    engine.submit("a", tokens(30), 1)
    engine.run()
    engine.core.clear_cache()
    engine.submit("b", tokens(30), 1)
    engine.run()
    engine.assert_answered("a", "b")
    assert engine.streams["b"].events[0].cached_tokens == 0


def test_salts_share_no_state() -> None:
    engine = harness()
    for name in "ab":
        engine.submit(name, tokens(30), 1, salt=name)
        engine.run()
    assert engine.streams["b"].events[0].cached_tokens == 0


# --- running ---


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_few_slots_make_requests_wait_and_nobody_starves(slots: int) -> None:
    engine = harness(state_slots=slots)
    for index in range(8):
        engine.submit(f"r{index}", tokens(11 + 5 * index, index % 3), 9)
    engine.run()
    engine.assert_answered(*engine.streams)
    engine.assert_empty()


def test_a_request_may_need_the_slot_of_the_very_state_it_would_have_gone_on_from() -> None:
    engine = harness(state_slots=2)
    engine.submit("a", tokens(20), 1)
    engine.run()
    assert engine.core.stats().kept_states == 1
    engine.submit("b", tokens(2, 1), 5)
    engine.step()
    engine.submit("c", tokens(20), 4)
    engine.run()
    engine.assert_answered("a", "b", "c")
    assert engine.streams["c"].events[0].cached_tokens == 0
    engine.assert_empty()


def test_a_preempted_request_recomputes_from_the_last_state_that_is_kept() -> None:
    engine = harness(blocks=16)
    for index in range(3):
        engine.submit(f"r{index}", tokens(20, index), 30)
    engine.run()
    engine.assert_answered(*engine.streams)
    assert engine.core.stats().preemptions > 0
    engine.assert_empty()


def test_a_leaked_slot_is_found() -> None:
    engine = harness()
    engine.submit("a", tokens(9), 20)
    engine.step()
    (seq,) = engine.core.live()
    slot, seq.state = seq.state, 0
    with pytest.raises(AssertionError, match="state slots"):
        engine.core.check()
    seq.state = slot
    engine.core.check()


# --- export ---


class Prefill:
    """A P engine whose records are read as they come; all must be right and in wire order."""

    def __init__(self, *, ring_tokens: int = 1000, **kwargs: object) -> None:
        self.port = FakePort(ring_bytes=ring_tokens * LAYOUT.groups[0].token_bytes)
        self.engine = harness(port=self.port, **kwargs)
        self.count = 0

    def run(self, prompt: list[int], send_from: int = 0, *, slow: bool = False) -> PrefillEnd:
        self.count += 1
        blob = np.asarray(prompt, dtype="<i4").tobytes()
        self.engine.core.handle(PrefillStart(f"s{self.count}", 1, send_from), blob)
        got: list[Record] = []
        for step in range(2000):
            worked = self.engine.step()
            if slow and step % 5:
                continue
            for record, _ in self.port.take(Record):
                span = (record.layer, record.token_start, record.token_end)
                assert self.port.record_bytes(record) == right(prompt, *span), record
                self.port.allocator.free(1)
                got.append(record)
            if not worked and (ends := self.port.take(PrefillEnd)):
                break
        ((end, _),) = ends
        assert end.status == "done"
        want = list(LAYOUT.extents(send_from, len(prompt), CHUNK))
        assert [(r.token_end, r.layer, r.group) for r in got] == [
            (e.span.end, e.layer, e.group) for e in want
        ]
        assert [r.nbytes for r in got] == [e.nbytes for e in want]
        assert end.records == len(want)
        self.engine.core.check()
        return end


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 33, 40, 61])
def test_states_leave_at_the_checkpoints_of_the_session(length: int) -> None:
    prefill = Prefill()
    assert prefill.run(tokens(length)).computed_tokens == length
    prefill.engine.assert_empty()


def test_a_cached_prefix_sends_the_states_of_its_own_checkpoints() -> None:
    prefill = Prefill()
    prefill.run(tokens(64))
    assert prefill.run(tokens(64)).cached_tokens == 64
    assert prefill.run([*tokens(50), 1, 2, 3]).cached_tokens == 48
    assert prefill.run(tokens(64), send_from=16).cached_tokens == 64
    assert prefill.run(tokens(64), send_from=21).cached_tokens == 64
    prefill.engine.assert_empty()


def test_a_prefix_that_lacks_the_state_of_a_checkpoint_counts_only_up_to_it() -> None:
    prefill = Prefill(state_slots=4)
    # Kept in the end: the states after 48, 56 and 64; checkpoints are after 16, 32, 48 and 64.
    prefill.run(tokens(64))
    assert prefill.engine.core.stats().kept_states == 3
    assert prefill.run(tokens(64), send_from=32).cached_tokens == 64
    assert prefill.run(tokens(64)).cached_tokens == 0
    prefill.engine.assert_empty()


def test_a_state_that_waits_for_the_ring_is_the_one_of_its_checkpoint() -> None:
    prefill = Prefill(ring_tokens=CHUNK)
    prefill.run(tokens(64), slow=True)
    prefill.run([*tokens(40), *tokens(30, 2)], slow=True)
    prefill.engine.assert_empty()


# --- import ---


class Decode:
    """A D engine and what its agent stages for it."""

    def __init__(self, **kwargs: object) -> None:
        self.port = FakePort(staging_bytes=1 << 16, verify_import=True)
        self.engine = harness(port=self.port, **kwargs)

    def fetch(self, name: str, prompt: list[int]) -> Fetch:
        self.engine.submit(name, prompt, 6, params=PARAMS)
        self.engine.step()
        ((fetch, _),) = self.port.take(Fetch)
        return fetch

    def answer(self, fetch: Fetch, prompt: list[int], status: str, end: int = 0) -> None:
        for extent in LAYOUT.extents(fetch.have, end or fetch.want, CHUNK):
            data = right(prompt, extent.layer, extent.span.start, extent.span.end)
            at = slice(extent.offset, extent.offset + extent.nbytes)
            self.port.staging_memory[at] = np.frombuffer(data, dtype=np.uint8)
        done = FetchDone(fetch.session, status, "" if status == "staged" else "cut", end, 0, CHUNK)
        self.engine.core.handle(done, b"")


@pytest.mark.parametrize("length", [2, 8, 9, 17, 18, 33, 64])
def test_staged_states_are_decoded_from(length: int) -> None:
    d, prompt = Decode(), tokens(length)
    d.answer(d.fetch("a", prompt), prompt, "staged")
    d.engine.run()
    d.engine.assert_answered("a")
    assert d.engine.runner.chunks == []
    d.engine.assert_empty()


def test_states_that_came_on_the_way_are_kept_for_others() -> None:
    d, prompt = Decode(), tokens(60)
    d.answer(d.fetch("a", prompt), prompt, "staged")
    d.engine.run()
    assert d.fetch("b", [*prompt[:50], 1, 2, 3]).have == 48
    assert d.fetch("c", [*prompt[:40], 1, 2, 3]).have == 32


def test_a_part_that_ends_at_a_checkpoint_is_gone_on_with() -> None:
    d, prompt = Decode(), tokens(60)
    d.answer(d.fetch("a", prompt), prompt, "partial", 32)
    d.engine.run()
    d.engine.assert_answered("a")
    assert d.engine.runner.chunks[0] == (32, 40)
    assert d.engine.streams["a"].events[0].imported_tokens == 32
    d.engine.assert_empty()


@pytest.mark.parametrize("end", [8, 24, 31])
def test_a_part_that_ends_elsewhere_is_of_no_use(end: int) -> None:
    d, prompt = Decode(), tokens(60)
    d.answer(d.fetch("a", prompt), prompt, "partial", end)
    d.engine.run()
    d.engine.assert_answered("a")
    assert d.engine.streams["a"].events[0].kv_reason == "bad_staging"
    assert [r.result for r in d.port.of(Release)] == ["failed"]
    d.engine.assert_empty()


@pytest.mark.parametrize("steps", range(1, 12))
def test_an_agent_lost_during_an_import_leaves_no_half_state(steps: int) -> None:
    d, prompt = Decode(import_bytes_per_step=200), tokens(60)
    d.answer(d.fetch("a", prompt), prompt, "staged")
    d.engine.step(steps)
    d.port.disconnect()
    d.engine.core.suspend_transfers()
    d.engine.core.disconnected()
    d.engine.run()
    d.engine.assert_answered("a")
    first = d.engine.runner.chunks[0][0] if d.engine.runner.chunks else 59
    assert first % 16 == 0 or first == 59
    d.engine.assert_empty()


def test_imports_wait_for_a_slot() -> None:
    d = Decode(state_slots=2)
    prompts = {name: tokens(40, seed) for seed, name in enumerate("abc")}
    for name, prompt in prompts.items():
        d.engine.submit(name, prompt, 20, params=PARAMS)
    d.engine.step()
    for fetch, _ in d.port.take(Fetch):
        name = "abc"[int(fetch.session.rpartition("-")[2]) - 1]
        d.answer(fetch, prompts[name], "staged")
        d.engine.run()
    d.engine.assert_answered("a", "b", "c")
    d.engine.assert_empty()


# --- two engines ---


@pytest.fixture(scope="module")
def tiny_hybrid(tiny_hybrid_dir: Path) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(tiny_hybrid_dir)


@pytest.mark.parametrize(
    ("kv_dtype", "d_block", "p_block"),
    [("float32", 16, 4), ("bfloat16", 32, 32), ("bfloat16", 16, 32), ("float16", 32, 8)],
)
def test_a_real_hybrid_answers_from_remote_states_as_it_does_alone(
    tiny_hybrid: LoadedModel, kv_dtype: str, d_block: int, p_block: int
) -> None:
    layout = tiny_hybrid.config.kv_layout(kv_dtype)

    def engine(
        block: int, port: FakePort | None = None, *, prefix_cache: bool = True
    ) -> CoreHarness:
        return CoreHarness(
            layout=layout, make_runner=lambda pool: TorchRunner(tiny_hybrid.model, pool),
            blocks=1024 // block, block_tokens=block, chunk_tokens=32, port=port,
            prefix_cache=prefix_cache,
        )  # fmt: skip

    local = engine(32)
    # D caches nothing, so that P's cache has something to give.
    decode = engine(
        d_block, FakePort(staging_bytes=1 << 22, verify_import=True), prefix_cache=False
    )
    prefill = engine(p_block, FakePort(ring_bytes=1 << 15))
    agents = LoopbackAgents(decode, prefill)
    stem = tokens(300)
    for index, length in enumerate((1, 2, 31, 32, 33, 64, 97, 150, 129)):
        shared = stem if index % 2 else []
        prompt = [token % 700 + 3 for token in (*shared, *tokens(length, index))]
        local.submit(f"r{index}", prompt, 12)
        local.run()
        decode.submit(f"r{index}", prompt, 12, params=PARAMS)
        while decode.step() | prefill.step() or not decode.core.idle:
            agents.pump()
    for name, stream in local.streams.items():
        assert decode.streams[name].tokens == stream.tokens
        assert len(stream.tokens) == 12
    assert decode.core.stats().computed_tokens == 0
    assert decode.port is not None
    sent = agents.digests()
    received = {r.session: r.digest for r in decode.port.of(Release)}
    assert received == sent
    cached = {record.group for record, _ in agents.records if record.cached}
    assert cached == {0, 1}, "P sent KV and states out of its own prefix cache"
