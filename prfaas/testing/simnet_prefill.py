"""P in the simulated network: retention, lanes that pull, leases; its engine is memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prfaas.codecs import default_codecs, encode
from prfaas.errors import InvalidRequest, Overloaded, PrfaasError, SessionLost
from prfaas.frames import Frame, FrameType
from prfaas.layout import KvLayout
from prfaas.ledger import piece_digest
from prfaas.memory_kv import MemorySource
from prfaas.rpc import convert
from prfaas.send_session import SendSession, SendState
from prfaas.session_messages import PrefillReport, SessionOpen
from prfaas.testing.simnet import End, Simulation, Stream, Timer, read_frames

HEARTBEAT_S = 1.0
LOST_LANE_S = 2.0
LAST_FRAMES_S = 1.0
CODECS = default_codecs().only(("planes-zstd", "raw"))  # those that every machine has


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """What P has and how fast it is."""

    retention_bytes: int = 1 << 20
    lease_s: float = 10.0
    tensor_s: float = 0.005
    """One tensor's compute, on average."""


@dataclass(slots=True)
class Served:
    """One session at P."""

    machine: SendSession
    raw_bytes: int
    heard_s: float
    reserved_bytes: int = 0
    control: End | None = None
    source: MemorySource | None = None
    told: dict[FrameType, Frame] = field(default_factory=dict)
    timers: list[Timer] = field(default_factory=list)


class SimPrefill:
    """Owns its sessions; each ends by itself, and with it all that is kept of it."""

    def __init__(
        self,
        sim: Simulation,
        layout: KvLayout,
        chunk_tokens: int,
        open_source: Callable[[SessionOpen], MemorySource],
        options: PrefillOptions,
    ) -> None:
        self.sessions: dict[int, Served] = {}
        self.lanes: dict[int, End] = {}
        self.reserved_bytes = 0
        self.ended: list[SendSession] = []
        self.on_ended: Callable[[SendSession], None] = lambda machine: None
        self.restarts = 0
        self._sim = sim
        self._layout = layout
        self._chunk_tokens = chunk_tokens
        self._open_source = open_source
        self._options = options
        self._waiting: list[Served] = []
        self._turns: deque[Served] = deque()
        self._idle: dict[int, None] = {}

    def connect(self, stream: Stream) -> None:
        """D has opened a stream; its first message says what it is for."""
        end = stream.ends[1]
        end.on_message = partial(self._first_on_lane if stream.lane else self._first, end)

    def restart(self) -> None:
        """The process is gone and a new one is there; whoever calls cuts the streams."""
        self._sim.note("P restarts")
        self.restarts += 1
        for served in self.sessions.values():
            served.machine.cancel()
            _stop(served)
        self.sessions.clear()
        self._waiting.clear()
        self._turns.clear()
        self.lanes.clear()
        self._idle.clear()
        self.reserved_bytes = 0

    def fail_engine(self, error: PrfaasError) -> None:
        """Every session fails."""
        for served in list(self.sessions.values()):
            self._fail(served, error)

    # --- lanes ---

    def _first_on_lane(self, end: End, data: bytes) -> None:
        frames = read_frames(end, data)
        if not frames or end in self.lanes.values():
            return
        number = convert.attach_from_bytes(frames[0].payload).lane
        self.lanes[number] = end
        end.on_message = lambda data: None
        end.on_taken = partial(self._lane_idle, number)
        end.on_end = partial(self._lane_over, number)
        end.send(data)

    def _lane_idle(self, number: int) -> None:
        if number in self.lanes:
            self._idle[number] = None
            self._pump()

    def _lane_over(self, number: int) -> None:
        if self.lanes.pop(number, None) is not None:
            self._idle.pop(number, None)
            self._sim.after(LOST_LANE_S, self._give_up, number)

    def _give_up(self, number: int) -> None:
        for served in self.sessions.values():
            served.machine.lane_lost(number)
        self._pump()

    def _pump(self) -> None:
        """Whatever may leave on lanes that are free, sessions in turn."""
        for number in list(self._idle):
            for _ in range(len(self._turns)):
                served = self._turns[0]
                self._turns.rotate(-1)
                frames = served.machine.take(number, app_limited=len(self._idle) > 1)
                if frames:
                    del self._idle[number]
                    self.lanes[number].send(b"".join(frame.serialize() for frame in frames))
                    if served.machine.ended:
                        self._release(served)
                    break

    # --- control ---

    def _first(self, end: End, data: bytes) -> None:
        frames = read_frames(end, data)
        if not frames:
            return
        frame = frames[0]
        served = self.sessions.get(frame.session)
        try:
            if frame.type is FrameType.OPEN:
                if served is not None:
                    raise InvalidRequest("the session is open already", param="session")
                served = self._admit(frame)
                self._attend(served, end)
                self._grant()
            else:
                if served is None or served.machine.epoch != frame.epoch:
                    raise SessionLost("the session is not open here")
                self._attend(served, end)
                self._heard(served, end, data)
        except PrfaasError as exc:
            payload = convert.error_to_bytes(exc)
            refusal = Frame(FrameType.ERROR, frame.session, frame.epoch, payload=payload)
            end.send(refusal.serialize())
            end.close()

    def _admit(self, frame: Frame) -> Served:
        request = convert.open_from_bytes(frame.payload)
        raw_bytes = self._layout.session_bytes(request.send_from, request.token_count)
        if raw_bytes > self._options.retention_bytes:
            raise Overloaded("more than all retention", retry_after_s=1.0)
        machine = SendSession(
            session=frame.session,
            epoch=frame.epoch,
            request=request,
            layout=self._layout,
            chunk_tokens=self._chunk_tokens,
        )
        served = Served(machine, raw_bytes, self._sim.now_s)
        self.sessions[frame.session] = served
        self._waiting.append(served)
        self._lease(served)
        return served

    def _attend(self, served: Served, end: End) -> None:
        if served.control is not None:
            served.control.close()
        served.control = end
        end.on_message = partial(self._heard, served, end)
        end.on_end = partial(_control_over, served, end)
        for frame in served.told.values():
            end.send(frame.serialize())

    def _grant(self) -> None:
        """Retention in order; who has to wait hears so."""
        options = self._options
        while self._waiting:
            served = self._waiting[0]
            if self.reserved_bytes + served.raw_bytes > options.retention_bytes:
                break
            del self._waiting[0]
            served.reserved_bytes = served.raw_bytes
            self.reserved_bytes += served.raw_bytes
            self._tell(served, served.machine.accept(0, served.raw_bytes, options.lease_s))
            served.source = self._open_source(served.machine.request)
            self._turns.append(served)
            self._later(served)
        for served in self._waiting:
            if FrameType.ACCEPT not in served.told:
                self._tell_place(served)

    def _tell_place(self, served: Served) -> None:
        if served in self._waiting:
            place = 1 + self._waiting.index(served)
            self._tell(served, served.machine.accept(place, 0, self._options.lease_s))
            served.timers.append(self._sim.after(HEARTBEAT_S, self._tell_place, served))

    def _tell(self, served: Served, frame: Frame) -> None:
        served.told[frame.type] = frame
        if served.control is not None:
            served.control.send(frame.serialize())

    def _heard(self, served: Served, end: End, data: bytes) -> None:
        machine = served.machine
        frames = read_frames(end, data)
        if not frames:
            return
        served.heard_s = self._sim.now_s
        try:
            for frame in frames:
                machine.receive(frame)
        except PrfaasError as exc:
            self._fail(served, exc)
        if machine.ended:
            self._release(served)
        elif served.reserved_bytes:
            needed = served.raw_bytes - machine.ledger.raw_bytes + machine.retained_bytes
            freed = max(0, served.reserved_bytes - needed)
            served.reserved_bytes -= freed
            self.reserved_bytes -= freed
            if freed:
                self._grant()
        self._pump()

    def _lease(self, served: Served) -> None:
        left_s = served.heard_s + self._options.lease_s - self._sim.now_s
        if left_s <= 1e-9:
            self._sim.note(f"P lease of {served.machine.session:x} ends")
            self._release(served)
        else:
            served.timers.append(self._sim.after(left_s, self._lease, served))

    # --- the engine ---

    def _later(self, served: Served) -> None:
        pause_s = self._options.tensor_s * self._sim.random.uniform(0.5, 1.5)
        served.timers.append(self._sim.after(pause_s, self._produce, served))

    def _produce(self, served: Served) -> None:
        machine, source = served.machine, served.source
        if source is None or machine.state is not SendState.PREFILLING:
            return
        event = source.take()
        if isinstance(event, PrefillReport):
            self._tell(served, machine.seal(event))
        else:
            codec = CODECS.negotiate(machine.request.codecs)
            piece, raw = event.piece, event.raw
            for cut in machine.claim(piece, raw.nbytes):
                if cut != piece:
                    raise ValueError(f"{piece} is too large for this simulation")
            number, payload = encode(codec, raw, self._layout.groups[piece.group].item_bytes)
            machine.put(
                piece,
                raw_bytes=raw.nbytes,
                digest=piece_digest(raw),
                codec=number,
                payload=payload,
            )
            event.done()
            self._later(served)
        self._pump()

    # --- the end of a session ---

    def _fail(self, served: Served, error: PrfaasError) -> None:
        machine = served.machine
        if machine.ended or machine.state is SendState.FAILING:
            return
        self._tell(served, machine.fail(error))
        served.timers.append(self._sim.after(LAST_FRAMES_S, self._release, served))
        if machine.ended:
            self._release(served)
        self._pump()

    def _release(self, served: Served) -> None:
        machine = served.machine
        if self.sessions.get(machine.session) is not served:
            return
        machine.cancel()
        del self.sessions[machine.session]
        self._sim.note(f"P {machine!r} resent={machine.resent_bytes}")
        if served in self._waiting:
            self._waiting.remove(served)
        if served in self._turns:
            self._turns.remove(served)
        self.reserved_bytes -= served.reserved_bytes
        served.reserved_bytes = 0
        _stop(served)
        if served.control is not None:
            served.control.close()
        self.ended.append(machine)
        self.on_ended(machine)
        self._grant()


def _control_over(served: Served, end: End) -> None:
    if served.control is end:
        served.control = None


def _stop(served: Served) -> None:
    for timer in served.timers:
        timer.cancel()
    if served.source is not None:
        served.source.cancel()
