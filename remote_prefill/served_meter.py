"""What P measures of one link: what left and was verified, its kernel's word, what limits it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from prfaas.clock import Clock
from prfaas.send_session import SendSession, SendState
from prfaas.session_messages import ReceiverReport
from prfaas.tcp_info import ConnectionProbe, TcpInfo
from prfaas.telemetry import LinkInfo
from remote_prefill.link_limit import WINDOW_S, LinkHistory, Look, StallClock, judge
from remote_prefill.link_meter import NEVER_S, RATIO_WEIGHT
from remote_prefill.link_sampler import LoopLoad

IDLE_LOOK_S = 1.0
"""How often the kernel is asked about connections on which no session runs."""

_DRAINING = frozenset({SendState.SEALED, SendState.FAILING})


class Lane(Protocol):
    """What is read of a lane."""

    number: int
    peer: str


@dataclass(slots=True)
class _Connection:
    probe: ConnectionProbe
    retransmitted_bytes: int | None = None
    """As the kernel counts them for this connection."""


class ServedMeter:
    """Measurements of one link at its sender; owns nothing, called by acks and, each LOOK_S, by
    `look`. `load` is that of the thread that sends.
    """

    def __init__(self, clock: Clock, load: LoopLoad) -> None:
        self._clock = clock
        self._load = load
        self._history = LinkHistory()
        self._stalls = StallClock()
        self._connections: dict[int, _Connection] = {}
        self._looked_s: float | None = None
        self._asked_s: float | None = None
        self._heard_s: float | None = None
        self._verified_bytes = 0
        """Since the look before."""
        self._under_way_bytes = 0
        self._to_come_bytes = 0.0
        self._wire_ratio = 1.0
        self._retransmitted_bytes: int | None = None
        self._tcp_rtt_s: float | None = None
        self._tcp_queueing_s = 0.0
        self._report: ReceiverReport | None = None

    @property
    def age_s(self) -> float:
        """Since D was last heard on any session; NEVER_S before."""
        return NEVER_S if self._heard_s is None else self._clock.now() - self._heard_s

    def heard(self, verified_bytes: int, report: ReceiverReport | None) -> None:
        """An ACK has come, by which so many bytes more have arrived for certain."""
        self._heard_s = self._clock.now()
        self._verified_bytes += verified_bytes
        self._report = report or self._report

    def ended(self, session: SendSession) -> None:
        """A session's last counts."""
        raw, wire = session.ledger.raw_bytes, session.wire_bytes
        if raw and wire:
            weight = 1.0 if self._wire_ratio == 1.0 else RATIO_WEIGHT
            self._wire_ratio += weight * (raw / wire - self._wire_ratio)

    def look(self, sessions: Iterable[SendSession], lanes: Iterable[Lane]) -> None:
        """Take note of how things stand."""
        now = self._clock.now()
        span_s = 0.0 if self._looked_s is None else now - self._looked_s
        self._looked_s = now
        here = list(sessions)
        idle = not here and self._asked_s is not None and now - self._asked_s < IDLE_LOOK_S
        path_busy = None if idle else self._ask_kernel(now, lanes)
        moved, self._verified_bytes = self._verified_bytes, 0
        self._under_way_bytes = sum(session.outstanding_bytes for session in here)
        self._to_come_bytes = sum(map(self._to_come, here))
        self._stalls.look(now, waiting=self._under_way_bytes > 0, moved=moved > 0)
        self._history.add(
            now,
            Look(
                span_s=span_s,
                open=bool(here),
                pressed=any(map(_presses, here)),
                path_busy=path_busy,
                moved_bytes=moved,
            ),
        )

    def info(self, link: LinkInfo) -> LinkInfo:
        """`link` with everything that is measured here."""
        report, age_s = self._report, self.age_s
        fresh = report is not None and age_s < WINDOW_S
        evidence = self._history.evidence(
            sender_busy_share=self._load.busy_share,
            receiver_busy_share=report.busy_share if report is not None and fresh else None,
        )
        told = report or ReceiverReport()
        goodput_age_s = NEVER_S if report is None else age_s + told.goodput_age_s
        return replace(
            link,
            limit=judge(evidence),
            rate_bytes_per_s=self._history.rate_bytes_per_s,
            rtt_s=told.rtt_s if self._tcp_rtt_s is None else self._tcp_rtt_s,
            queueing_s=told.queueing_s if self._tcp_rtt_s is None else self._tcp_queueing_s,
            in_flight_bytes=int(self._to_come_bytes),
            wire_ratio=self._wire_ratio,
            age_s=age_s,
            goodput_age_s=goodput_age_s,
            stalled_s=self._stalls.stalled_s,
            stalls=self._stalls.stalls,
            retransmitted_bytes=self._retransmitted_bytes,
            under_way_bytes=self._under_way_bytes,
            held_bytes=told.held_bytes,
            free_staging_bytes=told.free_staging_bytes,
        )

    def _to_come(self, session: SendSession) -> float:
        """Wire bytes that D has not verified yet, those included that are not computed."""
        ledger = session.ledger
        raw_left = ledger.layout.session_bytes(ledger.start, ledger.end) - ledger.raw_bytes
        return session.retained_bytes + raw_left / self._wire_ratio

    def _ask_kernel(self, now: float, lanes: Iterable[Lane]) -> float | None:
        """Share of the lanes' connections with bytes that are not acknowledged; None: unknown."""
        self._asked_s = now
        found = list(self._infos(lanes))
        if not found:
            return None
        rtts = [info.rtt_s for info in found if info.rtt_s is not None]
        least = [info.min_rtt_s for info in found if info.min_rtt_s is not None]
        if rtts:
            self._tcp_rtt_s = sum(rtts) / len(rtts)
            self._tcp_queueing_s = max(0.0, self._tcp_rtt_s - min(least)) if least else 0.0
        busy = sum(bool(info.unacked_packets or info.notsent_bytes) for info in found)
        return busy / len(found)

    def _infos(self, lanes: Iterable[Lane]) -> Iterator[TcpInfo]:
        open_lanes = {lane.number: lane for lane in lanes}
        for number in list(self._connections):
            if number not in open_lanes:
                del self._connections[number]
        for number, lane in open_lanes.items():
            connection = self._connections.get(number)
            if connection is None:
                connection = self._connections[number] = _Connection(ConnectionProbe(lane.peer))
            info = connection.probe.read()
            if isinstance(info, TcpInfo):
                self._count_retransmits(connection, info)
                yield info

    def _count_retransmits(self, connection: _Connection, info: TcpInfo) -> None:
        """What the kernel has sent again since it was asked before; at first, nothing: the
        connection may be older than the lane.
        """
        nbytes = info.bytes_retrans
        if nbytes is None and info.total_retrans_packets is not None:
            nbytes = info.total_retrans_packets * (info.mss_bytes or 0)
        if nbytes is None:
            return
        before = (
            nbytes if connection.retransmitted_bytes is None else (connection.retransmitted_bytes)
        )
        connection.retransmitted_bytes = nbytes
        self._retransmitted_bytes = (self._retransmitted_bytes or 0) + max(0, nbytes - before)


def _presses(session: SendSession) -> bool:
    """It has more to send than leaves at once, or all is sent and D has not all of it."""
    if session.queued:
        return True
    return session.state in _DRAINING and session.outstanding_bytes > 0
