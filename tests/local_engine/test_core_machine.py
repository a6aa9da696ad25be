"""Whatever happens in whatever order, answers are exact, books balance and nothing is left over."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from local_engine.testing import (
    CHAIN_LAYOUT,
    HYBRID_CHAIN_LAYOUT,
    CoreHarness,
    chain_kv,
    chain_state,
)
from prfaas.limits import Limits
from prfaas.testing.fake_port import FakePort
from prfaas_connect.port.messages import (
    Abort,
    Fetch,
    FetchDone,
    PrefillCancel,
    PrefillEnd,
    PrefillStart,
    Record,
    Release,
)

CHUNK = 8
LAYER_TOKEN = CHAIN_LAYOUT.groups[0].token_bytes
# Few stems, so that prefixes are shared; tails make them differ.
PROMPTS = st.builds(
    lambda stem, length, tail: ([stem] * 40)[:length] + tail,
    st.integers(1, 3),
    st.integers(0, 40),
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
)


class EngineMachine(RuleBasedStateMachine):
    """One engine in both roles; the machine plays clients and agent."""

    layout = CHAIN_LAYOUT
    state_slots = 0

    def __init__(self) -> None:
        super().__init__()
        self.port = FakePort(ring_bytes=20 * LAYER_TOKEN, staging_bytes=1 << 18)
        self.engine = CoreHarness(
            layout=self.layout,
            state_slots=self.state_slots,
            blocks=20,
            block_tokens=4,
            chunk_tokens=CHUNK,
            max_batch=3,
            import_bytes_per_step=2 * CHUNK * LAYER_TOKEN,
            port=self.port,
            limits=Limits(engine_event_queue=6),
        )
        self.engine.reads = False
        self.count = 0
        self.fetches: dict[str, tuple[Fetch, list[int]]] = {}
        self.extents: set[str] = set()
        self.exports: dict[str, tuple[list[int], int]] = {}
        self.received: dict[str, list[Record]] = {}
        self.unfreed = 0
        self.staging_at = 0

    # --- clients ---

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 24),
        remote=st.booleans(),
        salt=st.sampled_from(["", "", "x"]),
    )
    def submit(self, prompt: list[int], max_tokens: int, remote: bool, salt: str) -> None:
        self.count += 1
        params: dict[str, Any] | None = {"n": self.count} if remote else None
        max_tokens = min(max_tokens, 80 - len(prompt))
        self.engine.submit(f"r{self.count}", prompt, max_tokens, params=params, salt=salt)
        self.listen()

    @precondition(lambda self: self.engine.streams)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.core.cancel(data.draw(st.sampled_from(sorted(self.engine.streams))))
        self.after()

    @rule(which=st.integers(0, 3))
    def read(self, which: int) -> None:
        for index, stream in enumerate(self.engine.streams.values()):
            if which == 0 or index % 3 == which - 1:
                stream.read_all()

    # --- engine ---

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()
            self.after()

    @rule()
    def clear_cache(self) -> None:
        self.engine.core.clear_cache()
        self.after()

    # --- decode agent ---

    @precondition(lambda self: self.fetches)
    @rule(
        data=st.data(), status=st.sampled_from(["staged", "staged", "partial", "local", "refused"])
    )
    def answer_fetch(self, data: st.DataObject, status: str) -> None:
        session = data.draw(st.sampled_from(sorted(self.fetches)))
        fetch, prompt = self.fetches.pop(session)
        end = fetch.want if status == "staged" else 0
        if status == "partial":
            points = self.layout.checkpoints(fetch.have, fetch.want, CHUNK)
            end = data.draw(st.sampled_from(points or range(fetch.have + 1, fetch.want + 1)))
        offset = self.staging_at
        if end:
            self.extents.add(session)
            self.staging_at += self.layout.session_bytes(fetch.have, end)
            if self.staging_at > len(self.port.staging_memory):
                self.staging_at = offset
                end, status = 0, "local"
                self.extents.discard(session)
        for extent in self.layout.extents(fetch.have, max(end, fetch.have), CHUNK):
            rows = self.right(prompt, extent.layer, extent.span.start, extent.span.end)
            at = offset + extent.offset
            self.port.staging_memory[at : at + extent.nbytes] = np.frombuffer(
                rows.tobytes(), dtype=np.uint8
            )
        reason = "" if status == "staged" else "some_reason"
        self.engine.core.handle(FetchDone(session, status, reason, end, offset, CHUNK), b"")
        self.after()

    # --- prefill agent ---

    @rule(prompt=PROMPTS, data=st.data(), use_cache=st.booleans())
    def start_export(self, prompt: list[int], data: st.DataObject, use_cache: bool) -> None:
        self.count += 1
        session, send_from = f"e{self.count}", data.draw(st.integers(0, len(prompt)))
        self.exports[session] = (prompt, send_from)
        self.received[session] = []
        self.engine.core.handle(
            PrefillStart(session, 1, send_from, use_cache=use_cache),
            np.asarray(prompt, dtype="<i4").tobytes(),
        )
        self.after()

    @precondition(lambda self: self.exports)
    @rule(data=st.data())
    def cancel_export(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.exports)))
        self.engine.core.handle(PrefillCancel(session, 1), b"")
        self.after()
        assert session not in self.exports

    @rule(count=st.integers(1, 9))
    def free_ring(self, count: int) -> None:
        count = min(count, self.unfreed)
        self.port.allocator.free(count)
        self.unfreed -= count

    @rule()
    def lose_agent(self) -> None:
        self.port.disconnect()
        self.engine.core.suspend_transfers()
        self.engine.step()
        self.engine.core.disconnected()
        self.engine.core.check()
        self.port.sent.clear()
        self.fetches.clear()
        self.extents.clear()
        self.exports.clear()
        self.unfreed = 0
        self.port.reconnect()

    # --- what must hold ---

    def listen(self) -> None:
        """Take what the engine said, and hold it to its word."""
        for message, blob in self.port.take(Fetch):
            prompt = np.frombuffer(blob, dtype="<i4").tolist()
            assert 0 <= message.have <= message.want == len(prompt) - 1
            if message.have < message.want:  # else nobody waits for an answer
                self.fetches[message.session] = (message, prompt)
        for abort, _ in self.port.take(Abort):
            del self.fetches[abort.session]
        for release, _ in self.port.take(Release):
            self.extents.remove(release.session)
        for record, _ in self.port.take(Record):
            self.check_record(record)
            self.received[record.session].append(record)
            self.unfreed += 1
        for end, _ in self.port.take(PrefillEnd):
            prompt, send_from = self.exports.pop(end.session)
            records = self.received.pop(end.session)
            assert end.records == len(records)
            if end.status == "done":
                extents = self.layout.extents(send_from, len(prompt), CHUNK)
                want = [(e.span.start, e.span.end, e.layer) for e in extents]
                got = [(r.token_start, r.token_end, r.layer) for r in records]
                assert got == want, "not everything, or not in wire order"
            else:
                assert end.status == "cancelled"

    def check_record(self, record: Record) -> None:
        prompt, _ = self.exports[record.session]
        rows = self.right(prompt, record.layer, record.token_start, record.token_end)
        assert self.port.record_bytes(record) == rows.tobytes()

    def right(self, prompt: list[int], layer: int, start: int, end: int) -> npt.NDArray[np.float32]:
        """What tokens [start, end) leave in a layer, or the state after them."""
        place = self.engine.pool.places[layer]
        if self.layout.groups[place.group].keeps_state:
            return chain_state(prompt[:end], place.index)
        return chain_kv(prompt, place.index)[:, start:end]

    def after(self) -> None:
        self.listen()
        self.engine.core.check()
        for name, stream in self.engine.streams.items():
            for event in stream.events[:1]:
                cached = event.cached_tokens
                assert 0 <= event.imported_tokens <= cached < len(self.engine.prompts[name])
            if stream.last is not None and stream.last.error is None:
                self.engine.assert_answered(name)

    def teardown(self) -> None:
        """Everybody is served in the end: the engine never locks up."""
        for _ in range(3000):
            for fetch, _ in list(self.fetches.values()):
                self.engine.core.handle(FetchDone(fetch.session, "local", "late"), b"")
            self.fetches.clear()
            self.read(0)
            worked = self.engine.step()
            self.after()
            self.free_ring(100)
            if not worked and not self.unfreed and self.engine.core.idle:
                break
        for name, stream in self.engine.streams.items():
            assert stream.last is not None, f"{name} never ended: {list(self.engine.core.live())}"
        assert not self.exports
        assert not self.extents, "staging was not released"
        self.engine.assert_empty()
        stats = self.engine.core.stats()
        assert sum(stats.requests_finished.values()) == len(self.engine.streams)
        assert stats.waiting == stats.running == stats.exporting == stats.queue_tokens == 0


class HybridEngineMachine(EngineMachine):
    """The same with states: of five slots some run and some keep, so that both are short."""

    layout = HYBRID_CHAIN_LAYOUT
    state_slots = 5


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestEngineMachine = EngineMachine.TestCase
HybridEngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestHybridEngineMachine = HybridEngineMachine.TestCase
