"""Prefill sessions: every byte leaves once, in order, as it lies in the pool; nothing blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from local_engine.kv.pool import KvPool
from local_engine.testing import CHAIN_LAYERS, CHAIN_LAYOUT, CHAIN_VOCAB, CoreHarness, chain_kv
from prfaas.layout import chunk_spans
from prfaas.limits import Limits
from prfaas.testing.fake_port import FakePort
from prfaas_connect.port.messages import PrefillCancel, PrefillEnd, PrefillStart, Record

TOKEN_BYTES = CHAIN_LAYOUT.groups[0].token_bytes


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * 7 + i * i) % CHAIN_VOCAB for i in range(count)]


def blob(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def start(session: str = "s", *, send_from: int = 0, **fields: Any) -> PrefillStart:
    return PrefillStart(session, fields.pop("epoch", 1), send_from, **fields)


def engine_with_port(**kwargs: Any) -> tuple[CoreHarness, FakePort]:
    port = FakePort(ring_bytes=kwargs.pop("ring_bytes", 1 << 20))
    return CoreHarness(port=port, **kwargs), port


class Receiver:
    """Takes records out of the ring, puts them together, and frees the ring when told to."""

    def __init__(self, port: FakePort) -> None:
        self._port = port
        self.records: list[Record] = []
        self.data: dict[tuple[str, int, int, int], bytes] = {}
        self.ends: dict[str, PrefillEnd] = {}
        self.unfreed = 0

    def receive(self) -> int:
        taken = self._port.take(Record)
        for record, _ in taken:
            assert record.session not in self.ends, "a record after the end"
            key = (record.session, record.layer, record.token_start, record.token_end)
            assert key not in self.data, f"{key} came twice"
            self.data[key] = self._port.record_bytes(record)
            self.records.append(record)
        for end, _ in self._port.take(PrefillEnd):
            assert end.session not in self.ends
            self.ends[end.session] = end
        self.unfreed += len(taken)
        return len(taken)

    def free(self, count: int | None = None) -> None:
        count = self.unfreed if count is None else min(count, self.unfreed)
        self._port.allocator.free(count)
        self.unfreed -= count

    def assert_whole(self, session: str, ids: list[int], send_from: int, chunk: int) -> None:
        """All of [send_from, n) came, and is what the model says it must be."""
        spans = chunk_spans(send_from, len(ids), chunk)
        keys = {(session, layer, s.start, s.end) for s in spans for layer in range(CHAIN_LAYERS)}
        assert {key for key in self.data if key[0] == session} == keys
        for _, layer, low, high in keys:
            want = chain_kv(ids, layer)[:, low:high].tobytes()
            assert self.data[session, layer, low, high] == want
        end = self.ends[session]
        assert end.status == "done"
        assert end.records == len(keys)


def run(engine: CoreHarness, receiver: Receiver, most: int = 2000) -> None:
    for _ in range(most):
        worked = engine.step()
        moved = receiver.receive()
        receiver.free()
        if not worked and not moved:
            return
    raise AssertionError("still busy")


@pytest.mark.parametrize(
    ("length", "send_from"),
    [(n, s) for n in (1, 3, 7, 8, 9, 16, 29, 64) for s in (0, 1, 5, 8, 20) if s <= n],
)
def test_all_that_was_asked_for_leaves_exactly_once(length: int, send_from: int) -> None:
    engine, port = engine_with_port()
    receiver = Receiver(port)
    engine.core.handle(start(send_from=send_from), blob(tokens(length)))
    run(engine, receiver)
    receiver.assert_whole("s", tokens(length), send_from, 8)
    assert receiver.ends["s"].computed_tokens == length
    assert engine.runner.batches == [], "a prefill session has no decode step"
    engine.assert_empty()


def test_records_are_chunk_by_chunk_and_layer_by_layer() -> None:
    engine, port = engine_with_port()
    receiver = Receiver(port)
    engine.core.handle(start(send_from=3), blob(tokens(20)))
    run(engine, receiver)
    got = [(r.chunk, r.token_start, r.token_end, r.layer) for r in receiver.records]
    assert got == [
        (chunk, low, high, layer)
        for chunk, low, high in ((0, 3, 8), (1, 8, 16), (2, 16, 20))
        for layer in range(CHAIN_LAYERS)
    ]
    for record in receiver.records:
        assert record.nbytes == TOKEN_BYTES * (record.token_end - record.token_start)
        assert (record.group, record.head_start, record.head_end) == (0, 0, 1)
        assert not record.cached


def test_a_layer_leaves_while_the_next_is_still_to_be_computed() -> None:
    engine, port = engine_with_port()
    sent = []
    engine.runner.on_layer = lambda layer: sent.append((layer, len(port.of(Record))))
    engine.core.handle(start(), blob(tokens(8)))
    engine.step()
    assert sent == [(0, 1), (1, 2), (2, 3)]


def test_cached_parts_leave_first_and_are_marked() -> None:
    engine, port = engine_with_port()
    receiver = Receiver(port)
    engine.submit("a", tokens(21))
    engine.run()
    engine.runner.chunks.clear()
    ids = tokens(20) + tokens(20, 5)
    engine.core.handle(start(send_from=2), blob(ids))
    run(engine, receiver)
    receiver.assert_whole("s", ids, 2, 8)
    # The cached prefix of 20 tokens ends inside the third chunk, which therefore leaves as one.
    assert [r.cached for r in receiver.records] == [True] * 6 + [False] * 9
    end = receiver.ends["s"]
    assert (end.cached_tokens, end.computed_tokens) == (20, 20)
    assert engine.runner.chunks == [(20, 24), (24, 32), (32, 40)]


def test_a_session_that_is_cached_whole_computes_nothing() -> None:
    engine, port = engine_with_port()
    receiver = Receiver(port)
    for session in ("first", "second"):
        engine.core.handle(start(session), blob(tokens(16)))
        run(engine, receiver)
        receiver.assert_whole(session, tokens(16), 0, 8)
    assert receiver.ends["second"].computed_tokens == 0
    assert len(engine.runner.chunks) == 2
    engine.assert_empty()


def test_the_numeric_probe_neither_reads_nor_fills_the_cache() -> None:
    engine, port = engine_with_port(roles=("decode",))
    receiver = Receiver(port)
    for session in ("p", "q"):
        engine.core.handle(start(session, use_cache=False), blob(tokens(16)))
        run(engine, receiver)
        assert receiver.ends[session].cached_tokens == 0
    assert engine.core.stats().cached_blocks == 0


def test_salts_separate_sessions() -> None:
    engine, port = engine_with_port()
    receiver = Receiver(port)
    for salt in ("x", "y", "x"):
        session = f"{salt}{len(receiver.ends)}"
        engine.core.handle(start(session, salt=salt), blob(tokens(16)))
        run(engine, receiver)
    assert [end.cached_tokens for end in receiver.ends.values()] == [0, 0, 16]


def test_with_a_ring_of_one_record_the_model_goes_on_and_blocks_stay_until_copied_out() -> None:
    engine, port = engine_with_port(ring_bytes=8 * TOKEN_BYTES)
    receiver = Receiver(port)
    ids = tokens(32)
    engine.core.handle(start(), blob(ids))
    for _ in range(10):
        engine.step()
    assert engine.runner.chunks[-1] == (24, 32), "the model waited for the ring"
    assert engine.core.stats().free_blocks == engine.core.stats().total_blocks - 8
    # Somebody else needs blocks and must not get these.
    engine.submit("other", tokens(60, 3), 4)
    engine.run()
    engine.assert_answered("other")
    received = 0
    while "s" not in receiver.ends:
        receiver.receive()
        receiver.free(1)
        engine.step()
        received += 1
        assert received < 100
    receiver.assert_whole("s", ids, 0, 8)
    receiver.free()
    engine.assert_empty()


def test_exports_are_never_preempted_for_a_request() -> None:
    engine, port = engine_with_port(blocks=16, block_tokens=4, ring_bytes=8 * TOKEN_BYTES)
    receiver = Receiver(port)
    engine.submit("old", tokens(8, 1), 40)
    engine.step(2)
    engine.core.handle(start(), blob(tokens(40)))
    for _ in range(60):
        engine.step()
        engine.core.check()
    assert engine.streams["old"].last is None, "it had to wait for the export's blocks"
    run(engine, receiver)
    receiver.assert_whole("s", tokens(40), 0, 8)
    engine.assert_answered("old")


def test_sessions_and_requests_share_one_queue() -> None:
    engine, port = engine_with_port()
    engine.runner.token_s = 1.0
    receiver = Receiver(port)
    engine.submit("a", tokens(17, 1), 1)
    engine.core.handle(start("s1"), blob(tokens(16, 2)))
    engine.core.handle(start("s2"), blob(tokens(8, 3)))
    engine.submit("b", tokens(9, 4), 1)
    run(engine, receiver)
    assert engine.runner.chunks == [(0, 8), (8, 16), (0, 8), (8, 16), (0, 8), (0, 8)]
    assert receiver.ends["s1"].queue_s == pytest.approx(16)
    assert receiver.ends["s1"].compute_s == pytest.approx(16)
    assert receiver.ends["s2"].queue_s == pytest.approx(32)
    assert receiver.ends["s2"].compute_s == pytest.approx(8)
    engine.assert_answered("a", "b")


def test_a_session_passes_requests_that_wait_for_a_place_in_the_batch() -> None:
    engine, port = engine_with_port(max_batch=1)
    receiver = Receiver(port)
    engine.submit("running", tokens(4), 200)
    engine.step(3)
    engine.submit("waiting", tokens(9, 1), 2)
    engine.core.handle(start(), blob(tokens(16, 2)))
    for _ in range(20):
        engine.step()
        receiver.receive()
        receiver.free()
    assert receiver.ends["s"].status == "done"
    assert not engine.streams["waiting"].events


@pytest.mark.parametrize("steps", range(6))
def test_a_cancelled_session_stops_at_once_and_frees_everything(steps: int) -> None:
    engine, port = engine_with_port(ring_bytes=16 * TOKEN_BYTES)
    receiver = Receiver(port)
    engine.core.handle(start(), blob(tokens(40)))
    engine.core.handle(start("next"), blob(tokens(12, 1)))
    engine.step(steps)
    chunks = len(engine.runner.chunks)
    engine.core.handle(PrefillCancel("s", 1), b"")
    receiver.receive()
    engine.core.check()
    assert receiver.ends["s"].status == "cancelled"
    assert receiver.ends["s"].records == sum(r.session == "s" for r in receiver.records)
    run(engine, receiver)
    assert [end for _, end in engine.runner.chunks[chunks:]] == [8, 12]
    receiver.assert_whole("next", tokens(12, 1), 0, 8)
    engine.assert_empty()


def test_cancelling_what_is_over_or_of_another_epoch_is_ignored() -> None:
    engine, port = engine_with_port()
    receiver = Receiver(port)
    engine.core.handle(start(epoch=2), blob(tokens(16)))
    engine.core.handle(PrefillCancel("s", 1), b"")
    run(engine, receiver)
    receiver.assert_whole("s", tokens(16), 0, 8)
    engine.core.handle(PrefillCancel("s", 2), b"")
    assert port.of(PrefillEnd) == []


@pytest.mark.parametrize(
    ("message", "data", "reason"),
    [
        (start(), b"", "invalid_request_error: 0 tokens"),
        (start(), b"abc", "invalid_request_error: 3 bytes"),
        (start(), blob([1, CHAIN_VOCAB]), f"invalid_request_error: token {CHAIN_VOCAB} is outside"),
        (start(), blob([1, -1]), "invalid_request_error: token -1 is outside"),
        (start(), blob([1] * 101), "invalid_request_error: 101 tokens, this engine takes 1 to 100"),
        (start(send_from=3), blob([1, 2]), "invalid_request_error: send_from 3"),
        (start(send_from=-1), blob([1, 2]), "invalid_request_error: send_from -1"),
    ],
)
def test_bad_sessions_are_refused_and_cost_nothing(
    message: PrefillStart, data: bytes, reason: str
) -> None:
    engine, port = engine_with_port(max_context=100)
    engine.core.handle(message, data)
    (end,) = port.of(PrefillEnd)
    assert end.status == "failed"
    assert end.reason.startswith(reason)
    assert not engine.step()
    engine.assert_empty()


def test_sessions_that_cannot_be_served_now_are_refused() -> None:
    engine, port = engine_with_port(limits=Limits(engine_max_waiting=2))
    engine.core.handle(start("a"), blob(tokens(8)))
    engine.core.handle(start("a"), blob(tokens(8)))
    engine.core.handle(start("b"), blob(tokens(8)))
    engine.core.handle(start("c"), blob(tokens(8)))
    engine.core.draining = True
    engine.core.handle(start("d"), blob(tokens(8)))
    assert [(end.session, end.reason) for end in port.of(PrefillEnd)] == [
        ("a", "invalid_request_error: the session exists already"),
        ("c", "overloaded"),
        ("d", "draining"),
    ]


def test_an_engine_without_the_role_refuses_sessions() -> None:
    engine, port = engine_with_port(roles=("decode",))
    engine.core.handle(start(), blob(tokens(8)))
    assert port.of(PrefillEnd)[0].reason == "invalid_request_error: this engine has no prefill role"


def test_a_record_that_can_never_fit_the_ring_is_refused() -> None:
    engine, port = engine_with_port(ring_bytes=4 * TOKEN_BYTES)
    engine.core.handle(start("big"), blob(tokens(8)))
    engine.core.handle(start("small"), blob(tokens(4)))
    (end,) = port.of(PrefillEnd)
    assert end.session == "big"
    assert "does not fit" in end.reason


def test_prompts_longer_than_the_pool_are_refused() -> None:
    engine, port = engine_with_port(blocks=4, block_tokens=4)
    engine.core.handle(start("fits"), blob(tokens(16)))
    engine.core.handle(start("not"), blob(tokens(17)))
    assert [end.session for end in port.of(PrefillEnd)] == ["not"]
    receiver = Receiver(port)
    run(engine, receiver)
    receiver.assert_whole("fits", tokens(16), 0, 8)


@pytest.mark.parametrize("steps", range(6))
def test_when_the_agent_goes_its_sessions_go_and_requests_stay(steps: int) -> None:
    engine, port = engine_with_port(ring_bytes=8 * TOKEN_BYTES)
    engine.core.handle(start(), blob(tokens(40)))
    engine.submit("a", tokens(20, 1), 4)
    engine.step(steps)
    port.disconnect()
    engine.core.suspend_transfers()
    engine.step()
    engine.core.disconnected()
    engine.core.check()
    engine.run()
    engine.assert_answered("a")
    engine.assert_empty()
    port.reconnect()
    port.sent.clear()
    receiver = Receiver(port)
    engine.core.handle(start("new"), blob(tokens(12, 2)))
    run(engine, receiver)
    receiver.assert_whole("new", tokens(12, 2), 0, 8)


def test_a_lost_session_writes_nothing_to_the_next_connection() -> None:
    engine, port = engine_with_port(ring_bytes=8 * TOKEN_BYTES)
    engine.core.handle(start(), blob(tokens(40)))
    engine.step(2)
    port.disconnect()
    engine.core.suspend_transfers()
    port.reconnect()
    port.sent.clear()
    engine.step(3)
    assert port.of(Record) == []
    engine.core.disconnected()
    assert port.of(PrefillEnd) == []
    engine.assert_empty()


def test_exported_tokens_are_counted() -> None:
    engine, port = engine_with_port()
    receiver = Receiver(port)
    engine.core.handle(start(send_from=5), blob(tokens(30)))
    run(engine, receiver)
    assert engine.core.stats().exported_tokens == 25
    assert engine.core.stats().exporting == 0
    pool = KvPool(CHAIN_LAYOUT, 1, 1)
    assert pool.layout.token_bytes == TOKEN_BYTES * CHAIN_LAYERS
