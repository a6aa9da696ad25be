"""Both ends of a session under any order of events: Hypothesis looks for one that breaks a promise.

Settled means that nothing is in flight; success, that every frame was verified and is in place; a
session completes once; staging is held until the last decode; credit is never exceeded; only what
was lost or broken is sent again. Push and pull are two orders of the same promises.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.codecs import default_codecs
from prfaas.errors import CorruptKv, EngineUnavailable, PrfaasError
from prfaas.frames import Frame, parse_all
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.ledger import Piece, piece_digest
from prfaas.placement import StagingMap
from prfaas.receive_session import CORRUPT_IN_A_ROW, Arrival, ReceiveSession, ReceiveState
from prfaas.send_session import SendSession, SendState
from prfaas.session_messages import PrefillReport, SessionOpen

LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, (0, 1), 2, 4, "bfloat16"),))
WITH_STATES = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0, 2), 2, 4, "bfloat16"),
        LayerGroup(GroupKind.RECURRENT, (1,), 2, 2, "float32", state_dim=5),
    )
)
"""80 bytes of states, 64 of KV for each token: checkpoints are after 16 and 20 of 20 tokens."""
TOKENS, GRID = 20, 8
CODECS = default_codecs()
LANES = 3


class SessionMachine(RuleBasedStateMachine):
    """P and D with lanes and a control stream between, each of which may break at any time."""

    layout = LAYOUT

    @initialize(
        credit=st.sampled_from([0, 700, 1 << 20]),
        calm=st.sampled_from([True, True, False]),
        on_demand=st.booleans(),
    )
    def start(self, credit: int, calm: bool, on_demand: bool) -> None:
        """`calm`: nobody ends the session, so it has to complete."""
        self.calm = calm
        request = SessionOpen(
            transfer_id="t", model="m", tokens=bytes(4 * TOKENS), send_from=0, salt="",
            use_cache=True, quality="exact", codecs=("raw",), deadline_s=9, lease_s=9,
            engine_epoch="e", link=b"l", credit_bytes=credit, on_demand=on_demand,
        )  # fmt: skip
        layout = self.layout
        common = {"session": 7, "epoch": 1, "request": request, "layout": layout}
        self.p = SendSession(**common, chunk_tokens=GRID)
        self.d = ReceiveSession(**common, codecs=CODECS, chunk_tokens=GRID)
        nbytes = layout.extent_bytes(0, TOKENS, GRID)
        self.kv = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
        self.source = StagingMap(layout, 0, TOKENS, GRID, self.kv)
        self.buffer = np.zeros_like(self.kv)
        self.sink = StagingMap(layout, 0, TOKENS, GRID, self.buffer)
        self.lanes: dict[int, list[list[Frame]]] = {}
        self.opened = 0
        self.up: list[Frame] = []
        self.down: list[Frame] = []
        self.connected = True
        self.resumed = True
        self.decoding: list[Arrival] = []
        self.left = [
            Piece(e.span.index, e.layer, e.group, e.span.start, e.span.end, 0, 2)
            for e in layout.extents(0, TOKENS, GRID)
        ]
        self.granted = credit
        self.gone_bytes = 0
        self.resumes = 0
        self.asked: set[tuple[int, int]] = set()
        self.told: dict[int, Frame] = {}
        self.completions = 0
        self.errors: list[PrfaasError] = []
        for _ in range(LANES):
            self.open_lane()
        self.tell(self.p.accept(0, 0))

    # --- P ---

    def tell(self, frame: Frame) -> None:
        self.told[frame.type] = frame
        if self.connected and self.resumed:
            self.down.append(frame)

    @precondition(lambda self: self.left and self.p.state is SendState.PREFILLING)
    @rule(many=st.integers(1, 3))
    def export(self, many: int) -> None:
        for piece in self.left[:many]:
            raw = self.source.in_place(piece)
            assert raw is not None
            assert self.p.claim(piece, raw.nbytes) == (piece,)
            payload = raw.tobytes()
            self.p.put(
                piece, raw_bytes=raw.nbytes, digest=piece_digest(raw), codec=0, payload=payload
            )
        del self.left[:many]

    @precondition(lambda self: not self.left and self.p.state is SendState.PREFILLING)
    @rule()
    def seal(self) -> None:
        self.tell(self.p.seal(PrefillReport()))

    @precondition(lambda self: self.p.sendable and self.lanes)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.lanes)))
        frames = self.p.take(lane, app_limited=False)
        assert frames
        self.lanes[lane].append(frames)

    @precondition(lambda self: not self.calm and self.p.state is SendState.PREFILLING)
    @rule()
    def engine_fails(self) -> None:
        self.tell(self.p.fail(EngineUnavailable("gone")))

    @precondition(lambda self: not self.calm and not self.connected)
    @rule()
    def lease_ends(self) -> None:
        """P hears nothing for too long."""
        self.p.cancel()

    # --- lanes ---

    @precondition(lambda self: len(self.lanes) < LANES)
    @rule()
    def open_lane(self) -> None:
        self.lanes[self.opened] = []
        self.opened += 1

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), arrived=st.integers(0, 2))
    def break_lane(self, data: st.DataObject, arrived: int) -> None:
        """What has not arrived by then is gone."""
        lane = data.draw(st.sampled_from(sorted(self.lanes)))
        queue = self.lanes.pop(lane)
        for frames in queue[:arrived]:
            self.arrive(frames)
        self.gone_bytes += sum(frame.wire_bytes for frames in queue[arrived:] for frame in frames)

    @precondition(lambda self: any(self.lanes.values()))
    @rule(data=st.data(), twice=st.booleans())
    def deliver(self, data: st.DataObject, twice: bool) -> None:
        lane = data.draw(st.sampled_from(sorted(n for n, q in self.lanes.items() if q)))
        frames = self.lanes[lane].pop(0)
        self.arrive(frames)
        if twice:
            self.arrive(frames)

    def arrive(self, frames: list[Frame]) -> None:
        for frame in parse_all(b"".join(f.serialize() for f in frames)):
            self.at_d(frame)

    def at_d(self, frame: Frame) -> None:
        before = self.d.state
        try:
            arrival = self.d.receive(frame)
        except PrfaasError as exc:
            self.errors.append(exc)
            return
        if arrival is not None:
            self.decoding.append(arrival)
        self.count(before)

    def count(self, before: ReceiveState) -> None:
        if self.d.state is ReceiveState.COMPLETE and before is not ReceiveState.COMPLETE:
            self.completions += 1

    # --- D ---

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), flipped=st.integers(0, 3))
    def decode(self, data: st.DataObject, flipped: int) -> None:
        at = data.draw(st.integers(0, len(self.decoding) - 1))
        arrival = self.decoding.pop(at)
        before = self.d.state
        try:
            if flipped == 0:
                self.gone_bytes += arrival.frame.wire_bytes
                self.d.broken(arrival, CorruptKv("flipped"))
                return
            place = self.sink.in_place(arrival.piece)
            assert place is not None
            place[:] = np.frombuffer(arrival.frame.payload, dtype=np.uint8)
            self.d.decoded(arrival, piece_digest(place))
        except PrfaasError as exc:
            self.errors.append(exc)
        self.count(before)

    @precondition(lambda self: self.d.request.on_demand)
    @rule(chunk=st.integers(0, 2), layer=st.integers(0, 3))
    def want(self, chunk: int, layer: int) -> None:
        """Layer 3: all."""
        layers = range(layer, layer + 1) if layer < 3 else range(3)
        self.d.want(range(chunk, chunk + 1), layers)
        self.asked |= {(chunk, number) for number in layers}

    @precondition(lambda self: not self.calm)
    @rule()
    def times_out(self) -> None:
        """D has waited long enough."""
        self.d.fail()

    @precondition(lambda self: self.connected and self.resumed)
    @rule(credit=st.sampled_from([0, 600, 1500, 1 << 20]))
    def ack(self, credit: int) -> None:
        if self.d.ended and self.d.state is not ReceiveState.COMPLETE:
            return
        self.d.grant(credit)
        self.granted = max(self.granted, credit)
        self.up.append(self.d.ack(0.0, sorted(self.lanes), self.opened))

    @precondition(lambda self: not self.calm and self.connected)
    @rule()
    def cancel(self) -> None:
        if self.d.state is not ReceiveState.COMPLETE:
            self.up.append(self.d.cancel())

    # --- control ---

    @precondition(lambda self: self.up)
    @rule()
    def hear_at_p(self) -> None:
        (frame,) = parse_all(self.up.pop(0).serialize())
        self.p.receive(frame)

    @precondition(lambda self: self.down)
    @rule()
    def hear_at_d(self) -> None:
        (frame,) = parse_all(self.down.pop(0).serialize())
        self.at_d(frame)

    @precondition(lambda self: self.connected)
    @rule()
    def break_control(self) -> None:
        self.up.clear()
        self.down.clear()
        self.connected = False

    @precondition(lambda self: not self.connected and not self.p.ended and not self.d.ended)
    @rule()
    def resume(self) -> None:
        self.connected = True
        self.resumes += 1
        (frame,) = parse_all(self.d.resume(sorted(self.lanes), self.opened).serialize())
        self.p.receive(frame)
        self.down.extend(self.told.values())

    # --- promises ---

    @invariant()
    def credit_is_never_exceeded(self) -> None:
        assert self.p.outstanding_bytes <= self.granted
        assert self.d.pending_bytes <= self.granted

    @invariant()
    def retention_is_never_more_than_was_reserved(self) -> None:
        assert 0 <= self.p.retained_bytes <= self.layout.session_bytes(0, TOKENS)

    @invariant()
    def only_what_was_lost_or_broken_is_sent_again(self) -> None:
        """RESUME says again what came broken: it does not know what P has heard of that."""
        assert self.p.resent_bytes <= self.gone_bytes * (1 + self.resumes)

    @invariant()
    def on_demand_nothing_comes_that_nobody_asked_for(self) -> None:
        if self.d.request.on_demand:
            under_way = [f for queue in self.lanes.values() for frames in queue for f in frames]
            came = [arrival.frame for arrival in self.decoding]
            assert {(f.chunk, f.layer_start) for f in (*under_way, *came)} <= self.asked

    @invariant()
    def settled_means_nothing_in_flight(self) -> None:
        if self.p.ended:
            assert (self.p.outstanding_bytes, self.p.retained_bytes) == (0, 0)
            assert (self.p.queued, self.p.lanes_used, self.p.sendable) == (0, (), False)

    @invariant()
    def success_means_every_byte_is_verified_and_in_place(self) -> None:
        assert self.completions <= 1
        if self.d.state is ReceiveState.COMPLETE:
            assert self.d.ledger.whole
            assert self.buffer.tobytes() == self.kv.tobytes()
            assert not self.decoding  # so staging may be given to the engine
        if self.p.state is SendState.COMPLETE:
            assert self.d.state is ReceiveState.COMPLETE

    @invariant()
    def what_can_be_gone_on_from_is_in_place(self) -> None:
        """Of a session that failed, too: KV up to there, and every state that goes with it."""
        end = self.d.ledger.resumable
        assert end in (0, *(self.layout.checkpoints(0, TOKENS, GRID) or (8, 16, TOKENS)))
        nbytes = self.layout.extent_bytes(0, end, GRID)
        assert self.buffer[:nbytes].tobytes() == self.kv[:nbytes].tobytes()

    @invariant()
    def errors_are_those_that_were_caused(self) -> None:
        for error in self.errors:
            assert isinstance(error, EngineUnavailable) or (
                isinstance(error, CorruptKv) and self.d.corrupt >= CORRUPT_IN_A_ROW
            ), error

    def teardown(self) -> None:
        """Without further faults, a session that nobody has ended completes."""
        if not hasattr(self, "p") or not self.calm or self.p.ended:
            return
        if self.d.corrupt >= CORRUPT_IN_A_ROW and self.d.state is ReceiveState.FAILED:
            return
        if not self.connected and not self.d.ended:
            self.resume()
        self.connected = True
        while len(self.lanes) < LANES:
            self.open_lane()
        self.asked |= {(chunk, layer) for chunk in range(3) for layer in range(3)}
        self.d.want()
        self.export(len(self.left))
        if self.p.state is SendState.PREFILLING:
            self.seal()
        for _ in range(500):
            while self.down:
                self.hear_at_d()
            while self.p.sendable:
                self.lanes[min(self.lanes)].append(self.p.take(min(self.lanes), app_limited=False))
            for queue in self.lanes.values():
                while queue:
                    self.arrive(queue.pop(0))
            while self.decoding:
                arrival = self.decoding.pop()
                place = self.sink.in_place(arrival.piece)
                assert place is not None
                place[:] = np.frombuffer(arrival.frame.payload, dtype=np.uint8)
                self.d.decoded(arrival, piece_digest(place))
            self.ack(1 << 20)
            while self.up:
                self.hear_at_p()
            if self.p.ended:
                break
        assert (self.p.state, self.d.state) == (SendState.COMPLETE, ReceiveState.COMPLETE)
        self.success_means_every_byte_is_verified_and_in_place()


class StateSessionMachine(SessionMachine):
    """The same with states at checkpoints."""

    layout = WITH_STATES


SessionMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
StateSessionMachine.TestCase.settings = settings(SessionMachine.TestCase.settings, max_examples=100)
TestSessionMachine = SessionMachine.TestCase
TestStateSessionMachine = StateSessionMachine.TestCase
