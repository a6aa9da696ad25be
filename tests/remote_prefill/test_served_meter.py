"""P's view of a link: from what left, what was verified, and what the receiver says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from prfaas.codecs import RAW
from prfaas.layout import GroupKind, KvLayout, LayerGroup, chunk_spans
from prfaas.ledger import Piece
from prfaas.send_session import SendSession
from prfaas.session_messages import PrefillReport, ReceiverReport, SessionAck, SessionOpen
from prfaas.tcp_info import TcpInfo, Unavailable, parse_tcp_info
from prfaas.telemetry import LinkInfo, LinkLimit
from prfaas.testing.clock import ManualClock
from remote_prefill import served_meter
from remote_prefill.link_sampler import LoopLoad
from remote_prefill.served_meter import ServedMeter

LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, (0,), 1, 8, "bfloat16"),))
CHUNK = 8
TOKEN_BYTES = 32
CHUNK_WIRE_BYTES = CHUNK * TOKEN_BYTES + 68


def session(tokens: int = 64, credit_bytes: int = 1 << 20) -> SendSession:
    request = SessionOpen(
        transfer_id="t",
        model="m",
        tokens=bytes(4 * tokens),
        send_from=0,
        salt="",
        use_cache=True,
        quality="exact",
        codecs=("raw",),
        deadline_s=10,
        lease_s=10,
        engine_epoch="e",
        credit_bytes=credit_bytes,
    )
    made = SendSession(session=1, epoch=1, request=request, layout=LAYOUT, chunk_tokens=CHUNK)
    made.accept(0, 0)
    return made


def put(target: SendSession, chunk: int) -> None:
    spans = list(chunk_spans(0, target.ledger.end, CHUNK))
    span = spans[chunk]
    piece = Piece(chunk, 0, 0, span.start, span.end, 0, 1)
    nbytes = target.ledger.piece_bytes(piece)
    (cut,) = target.claim(piece, nbytes)
    target.put(cut, raw_bytes=nbytes, digest=bytes(16), codec=RAW.id, payload=bytes(nbytes))


@dataclass
class Link:
    """A meter with its sessions, looked at every 50 ms of virtual time."""

    clock: ManualClock = field(default_factory=ManualClock)
    sessions: list[SendSession] = field(default_factory=list)
    lanes: list[Any] = field(default_factory=list)
    cpu_share: float = 0.0

    def __post_init__(self) -> None:
        self.load = LoopLoad(self.clock, lambda: self.cpu_share * self.clock.now())
        self.meter = ServedMeter(self.clock, self.load)

    def run(self, seconds: float = 1.0, report: ReceiverReport | None = None) -> LinkInfo:
        for _ in range(round(seconds / 0.05)):
            self.clock.advance(0.05)
            if report is not None:
                self.meter.heard(0, report)
            self.load.look()
            self.meter.look(self.sessions, self.lanes)
        return self.info

    def ack(self, target: SendSession, upto: int, report: ReceiverReport | None = None) -> None:
        before = target.verified_bytes
        target.acked(SessionAck(next_sequence=upto, credit_bytes=1 << 20, report=report))
        self.meter.heard(target.verified_bytes - before, target.report)

    @property
    def info(self) -> LinkInfo:
        return self.meter.info(LinkInfo("fra", "p0", agent="d0"))


READY = ReceiverReport(busy_share=0.1)


def test_a_link_without_sessions_is_idle() -> None:
    link = Link()
    info = link.run()
    assert info.limit is LinkLimit.IDLE
    assert (info.peer, info.instance, info.agent) == ("fra", "p0", "d0")
    assert info.goodput_age_s == info.age_s == served_meter.NEVER_S
    assert info.retransmitted_bytes is None


def test_a_prefill_that_has_made_nothing_more_is_a_slow_sender() -> None:
    link = Link(sessions=[session()])
    assert link.run(report=READY).limit is LinkLimit.SENDER
    put(link.sessions[0], 0)
    link.sessions[0].take(0, app_limited=True)
    assert link.run(report=READY).limit is LinkLimit.SENDER  # under way, and more is computed


@pytest.mark.parametrize("spent", [False, True])
def test_frames_that_wait_are_the_links_or_the_receivers_doing(spent: bool) -> None:
    """Whether they wait for a lane or for credit."""
    link = Link(sessions=[session(credit_bytes=400 if spent else 1 << 20)])
    for chunk in range(3):
        put(link.sessions[0], chunk)
    if spent:
        link.sessions[0].take(0, app_limited=False)
        assert link.sessions[0].starved
    assert link.run(report=READY).limit is LinkLimit.LINK
    assert link.run(report=ReceiverReport(busy_share=0.95)).limit is LinkLimit.RECEIVER
    link.cpu_share = 1.0
    link.run(0.05)
    assert link.run(1.0, report=READY).limit is LinkLimit.SENDER


def test_a_sealed_session_that_is_still_under_way_waits_for_the_link() -> None:
    sender = session(tokens=CHUNK)
    link = Link(sessions=[sender])
    put(sender, 0)
    sender.seal(PrefillReport())
    sender.take(0, app_limited=True)
    info = link.run(report=READY)
    assert info.limit is LinkLimit.LINK
    assert info.under_way_bytes == CHUNK_WIRE_BYTES


def test_an_old_word_of_the_receiver_does_not_count_and_the_kernels_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unacked = 0

    class Probe:
        def __init__(self, peer: str) -> None:
            assert peer == "ipv4:127.0.0.1:5"

        def read(self) -> TcpInfo:
            return tcp_info(unacked_packets=unacked)

    monkeypatch.setattr(served_meter, "ConnectionProbe", Probe)
    link = Link(sessions=[session()], lanes=[Lane(0, "ipv4:127.0.0.1:5")])
    for chunk in range(3):
        put(link.sessions[0], chunk)
    assert link.run(report=ReceiverReport(busy_share=1.0)).limit is LinkLimit.RECEIVER
    unacked = 3
    assert link.run(2.0).limit is LinkLimit.LINK
    unacked = 0  # all that left has reached the other host
    assert link.run(2.0).limit is LinkLimit.RECEIVER


def test_bytes_are_counted_from_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = session(tokens=8 * CHUNK)
    link = Link(sessions=[sender])
    for chunk in range(4):
        put(sender, chunk)
    taken = sender.take(0, app_limited=False)
    assert len(taken) == 4
    link.run(0.5)
    report = ReceiverReport(0.1, 300, 5000, rtt_s=0.04, queueing_s=0.01, goodput_age_s=7.0)
    link.ack(sender, 3, report)
    info = link.run(0.5)
    assert info.rate_bytes_per_s == pytest.approx(3 * CHUNK_WIRE_BYTES, rel=0.06)
    assert info.under_way_bytes == CHUNK_WIRE_BYTES
    assert info.in_flight_bytes == CHUNK * TOKEN_BYTES * 5  # one retained, four to compute
    assert (info.held_bytes, info.free_staging_bytes) == (300, 5000)
    assert (info.rtt_s, info.queueing_s) == (0.04, 0.01)
    assert info.age_s == pytest.approx(0.5)
    assert info.goodput_age_s == pytest.approx(7.5)
    assert link.run(1.1).rate_bytes_per_s == 0.0


def test_the_wire_ratio_is_that_of_sessions_that_have_ended() -> None:
    link = Link()
    sender = session(tokens=CHUNK)
    put(sender, 0)
    link.meter.ended(sender)
    assert link.info.wire_ratio == pytest.approx(CHUNK * TOKEN_BYTES / CHUNK_WIRE_BYTES)
    link.meter.ended(session())  # one that sent nothing says nothing
    assert link.info.wire_ratio == pytest.approx(CHUNK * TOKEN_BYTES / CHUNK_WIRE_BYTES)


def test_bytes_under_way_of_which_nothing_is_heard_are_a_stall() -> None:
    sender = session()
    link = Link(sessions=[sender])
    put(sender, 0)
    sender.take(0, app_limited=True)
    info = link.run(3.0)
    assert info.stalls == 1
    assert info.stalled_s == pytest.approx(3.0, abs=0.11)
    link.ack(sender, 1)
    info = link.run(5.0)
    assert (info.stalls, info.stalled_s) == (1, 0.0)


@dataclass
class Lane:
    number: int
    peer: str


def tcp_info(**fields: Any) -> TcpInfo:
    nothing = parse_tcp_info(b"")
    return TcpInfo(**({n: getattr(nothing, n) for n in TcpInfo.__dataclass_fields__} | fields))


class Kernel:
    """Connections by peer; each may go away and come again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.infos: dict[str, TcpInfo] = {}
        self.reads = 0
        kernel = self

        class Probe:
            def __init__(self, peer: str) -> None:
                self.peer = peer

            def read(self) -> TcpInfo | Unavailable:
                kernel.reads += 1
                return kernel.infos.get(self.peer, Unavailable("no such connection"))

        monkeypatch.setattr(served_meter, "ConnectionProbe", Probe)


def test_the_kernels_numbers_are_summed_over_lanes_and_outlive_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel(monkeypatch)
    link = Link(sessions=[session()], lanes=[Lane(0, "a"), Lane(1, "b")])
    kernel.infos["a"] = tcp_info(rtt_s=0.05, min_rtt_s=0.04, bytes_retrans=1000)
    kernel.infos["b"] = tcp_info(rtt_s=0.07, min_rtt_s=0.045, bytes_retrans=5)
    info = link.run(0.1)
    assert info.retransmitted_bytes == 0  # what was before is not the link's
    assert info.rtt_s == pytest.approx(0.06)
    assert info.queueing_s == pytest.approx(0.02)
    kernel.infos["a"] = tcp_info(rtt_s=0.05, min_rtt_s=0.04, bytes_retrans=1300)
    kernel.infos["b"] = tcp_info(rtt_s=0.07, min_rtt_s=0.045, bytes_retrans=25)
    assert link.run(0.1).retransmitted_bytes == 320
    del link.lanes[0]
    link.lanes.append(Lane(2, "c"))
    kernel.infos["c"] = tcp_info(total_retrans_packets=10, mss_bytes=1000)
    assert link.run(0.1).retransmitted_bytes == 320
    kernel.infos["c"] = tcp_info(total_retrans_packets=12, mss_bytes=1000)
    assert link.run(0.1).retransmitted_bytes == 2320


def test_without_the_kernels_word_the_receivers_round_trip_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Kernel(monkeypatch)
    link = Link(sessions=[session()], lanes=[Lane(0, "a")])
    info = link.run(report=ReceiverReport(rtt_s=0.03, queueing_s=0.002))
    assert (info.rtt_s, info.queueing_s, info.retransmitted_bytes) == (0.03, 0.002, None)


def test_an_idle_links_connections_are_asked_about_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel(monkeypatch)
    link = Link(lanes=[Lane(0, "a")])
    link.run(10.0)
    assert 9 <= kernel.reads <= 11
    link.sessions.append(session())
    link.run(1.0)
    assert kernel.reads >= 28
