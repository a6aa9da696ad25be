"""What the tries of one fetch came to: bytes, phases, reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from prfaas.codecs import CodecSet, Quality, base_name
from prfaas.errors import PrfaasError
from remote_prefill.peer_link import PeerLink
from remote_prefill.receiver import Receiver
from remote_prefill.worth_waiting import SLOWER


@dataclass(slots=True)
class Tally:
    """What the tries of a fetch came to, for its outcome."""

    tried: list[str] = field(default_factory=list)
    tried_reasons: list[str] = field(default_factory=list)
    """Why each of them failed the last time; empty where it did not."""
    peer: str = ""
    instance: str = ""
    remote_cached_tokens: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    hidden_wire_bytes: int = 0
    codecs: dict[str, int] = field(default_factory=dict)
    """Raw bytes by codec."""
    quality: Quality | None = None
    """Class of what came; None: nothing did."""
    phases: dict[str, float] = field(default_factory=dict)

    def add(self, link: PeerLink, receiver: Receiver, codecs: CodecSet) -> None:
        """One try that opened a session; phases add up over tries."""
        machine, times = receiver.machine, receiver.times
        self.peer, self.instance = link.peer, link.instance
        self.raw_bytes += machine.ledger.raw_bytes
        self.wire_bytes += machine.wire_bytes
        self.hidden_wire_bytes += receiver.hidden_wire_bytes
        for number, carried in machine.carried.items():
            codec = codecs.by_id(number)
            name = base_name(codec.name)
            self.codecs[name] = self.codecs.get(name, 0) + carried.raw_bytes
            self.quality = Quality.worst((codec.quality, self.quality or codec.quality))
        end = times.ended_s
        queue_s = 0.0
        self._phase("connect", times.opened_s, times.accepted_s or end)
        if times.accepted_s:
            queue_s = (times.started_s or end) - times.accepted_s
        if times.started_s:
            self._phase("first_frame", times.started_s, times.first_frame_s or end)
        if times.first_frame_s:
            self._phase("transfer", times.first_frame_s, end)
        if machine.seal is not None:
            report = machine.seal.report
            self.remote_cached_tokens = report.cached_tokens
            queue_s += report.queue_s
            self.add_phase("remote_compute", report.compute_s)
        self.add_phase("queue", queue_s)

    def add_phase(self, name: str, seconds: float) -> None:
        self.phases[name] = self.phases.get(name, 0.0) + max(0.0, seconds)

    def _phase(self, name: str, start_s: float, end_s: float) -> None:
        self.add_phase(name, end_s - start_s)


_PHASES = frozenset({"connect", "queue", "first_frame", "progress", "total", "lease", SLOWER})


def reason_of(error: PrfaasError) -> str:
    """A stable word for an error: its kind, and the phase that ran out of time.

    The other side's words are its own affair: only phases known here become part of a label.
    """
    return f"{error.kind}_{error.phase}" if error.phase in _PHASES else error.kind
