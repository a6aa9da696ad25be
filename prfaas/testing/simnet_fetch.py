"""One fetch at D in the simulated network: tries, deadlines, decoding, and what it asks for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from prfaas.codecs import default_codecs
from prfaas.errors import CorruptKv, PeerUnavailable, PrefillTimeout, PrfaasError, SessionLost
from prfaas.frames import Frame, FrameType
from prfaas.ledger import piece_digest
from prfaas.placement import StagingMap
from prfaas.receive_session import Arrival, ReceiveSession, ReceiveState
from prfaas.session_messages import SessionOpen
from prfaas.testing.simnet import End, Timer, read_frames

if TYPE_CHECKING:
    from prfaas.testing.simnet_decode import SimDecode

ACK_S = 1.0
ACK_BUSY_S = 0.05
RESUME_FIRST_S = 0.05
LAST_FRAMES_S = 1.0
CODECS = default_codecs().only(("planes-zstd", "raw"))  # those that every machine has


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Deadlines by phase, and how fast D is."""

    connect_s: float = 3.0
    queue_s: float = 5.0
    first_frame_s: float = 5.0
    progress_s: float = 5.0
    total_s: float = 60.0
    lease_s: float = 10.0
    decode_s: float = 0.002
    """One frame's decoding, on average."""
    think_s: float = 0.05
    """On demand: from one answer to the next question, on average."""
    resume_tries: int = 5
    """So often in a row a control stream may break before it has brought anything."""
    lost_retries: int = 2
    """So often P may have lost the session."""
    import_s: float = 0.01
    """The engine holds the staging for so long."""
    questions: tuple[tuple[range | None, range | None], ...] = ()
    """On demand: (chunks, layers) asked for one after another, and then everything; empty: one
    chunk after another, in a random order.
    """


class FetchState(enum.StrEnum):
    """Where a fetch stands."""

    WAITING = "waiting"
    """For staging."""
    RECEIVING = "receiving"
    STAGED = "staged"
    """The engine reads the staging."""
    SETTLED = "settled"


@dataclass(slots=True)
class _Timers:
    ack: Timer | None = None
    ack_at_s: float = 0.0
    deadline: Timer | None = None
    other: list[Timer] = field(default_factory=list)


class SimFetch:
    """Owns its staging from `start` until it settles, which happens once, and always."""

    def __init__(
        self, decode: SimDecode, transfer_id: str, session: int, kv: StagingMap, *, on_demand: bool
    ) -> None:
        self.transfer_id = transfer_id
        self.session = session
        self.state = FetchState.WAITING
        self.kv = kv
        """What P has: to compare with, never to copy from."""
        self.nbytes = decode.layout.session_bytes(0, kv.end)
        self.buffer = np.zeros(self.nbytes, dtype=np.uint8)
        self.epoch = 0
        self.decoding = 0
        self.broken_bytes = 0
        self.came: list[tuple[int, int]] = []
        """(chunk, layer) of the last try, as it was verified."""
        self.machine: ReceiveSession | None = None
        self._decode = decode
        self._sim = decode.sim
        self._options = decode.options.fetch
        self._on_demand = on_demand
        self._sink = StagingMap(decode.layout, 0, kv.end, decode.chunk_tokens, self.buffer)
        self._begun_s = self._sim.now_s
        self._phase = "connect"
        self._phase_s = 0.0
        self._error: PrfaasError | None = None
        self._control: End | None = None
        self.streams = 0
        """Control streams opened so far."""
        self._answered = False
        self._tries = 0
        self.watermark = 0
        """Up to which token what is here after all tries can be used."""
        self._questions: list[tuple[range | None, range | None]] = []
        self._asking = False
        self._timers = _Timers()
        self._forgotten = False
        self._aborted = False
        self._timers.other.append(self._sim.after(self._options.total_s, self._overdue))

    @property
    def holds_staging(self) -> bool:
        """From its start on; whoever settles it takes it back."""
        return self.epoch > 0

    # --- tries ---

    def start(self) -> None:
        """Staging is there: open a session for what is missing."""
        decode, options = self._decode, self._options
        self.state = FetchState.RECEIVING
        self.epoch += 1
        self._error = None
        self._tries = 0
        self._asking = False
        self.came = []
        self._questions = list(options.questions) or self._random_questions()
        self._questions.append((None, None))
        request = SessionOpen(
            transfer_id=self.transfer_id,
            model="m",
            tokens=bytes(4 * self.kv.end),
            send_from=self.watermark,
            salt="",
            use_cache=True,
            quality="exact",
            codecs=CODECS.names,
            deadline_s=options.total_s,
            lease_s=options.lease_s,
            engine_epoch="e",
            link=b"link",
            credit_bytes=decode.share_bytes,
            on_demand=self._on_demand,
        )
        self.machine = ReceiveSession(
            session=self.session,
            epoch=self.epoch,
            request=request,
            layout=decode.layout,
            codecs=CODECS,
            chunk_tokens=decode.chunk_tokens,
        )
        self._enter("connect")
        self._connect(self.machine.open())

    def _random_questions(self) -> list[tuple[range | None, range | None]]:
        chunks = list(range(-(-self.kv.end // self._decode.chunk_tokens)))
        self._sim.random.shuffle(chunks)
        return [(range(chunk, chunk + 1), None) for chunk in chunks]

    def abort(self) -> None:
        """The client is gone."""
        if self.state is FetchState.WAITING:
            self._settle("aborted")
        elif self.state is FetchState.RECEIVING:
            self._aborted = True
            self._failed(PrfaasError("the client is gone"))

    def forget(self) -> None:
        """The process is gone: nothing of this happens any more."""
        self._forgotten = True
        self._control = None
        self._stop_timers()

    def _overdue(self) -> None:
        if self.state is FetchState.WAITING:
            self._settle("local total")
        else:
            self._failed(PrefillTimeout("too late", phase="total"))

    def _failed(self, error: PrfaasError) -> None:
        """End this try, once what is being decoded is decoded."""
        if self.machine is None or self.state is not FetchState.RECEIVING:
            return
        self._error = self._error or error
        self.machine.fail()
        self._conclude()

    def _conclude(self) -> None:
        error, machine = self._error, self.machine
        if error is None or machine is None or self.decoding:
            return
        self._hang_up(machine.cancel())
        self.watermark = max(self.watermark, machine.ledger.resumable)
        if self._aborted:
            self._settle("aborted")
            return
        late = self._sim.now_s - self._begun_s >= self._options.total_s
        again = self.epoch <= self._options.lost_retries and self.watermark < self.kv.end
        if isinstance(error, SessionLost) and again and not late:
            self.start()
        elif self.watermark:
            self._staged(f"partial {error.phase or error.kind}")
        else:
            self._settle(f"local {error.phase or error.kind}")

    def _complete(self) -> None:
        machine = self.machine
        if machine is None or machine.state is not ReceiveState.COMPLETE or self._error:
            return
        if self.state is FetchState.RECEIVING:
            self.watermark = self.kv.end
            self._decode.on_complete(self)
            self._hang_up(machine.ack(0.0, self._decode.open_lanes, self._decode.opened))
            self._staged("staged")

    def _staged(self, outcome: str) -> None:
        self.state = FetchState.STAGED
        self._stop_timers()
        self._sim.after(self._options.import_s, self._settle, outcome)

    def _settle(self, outcome: str) -> None:
        if self.state is not FetchState.SETTLED and not self._forgotten:
            self.state = FetchState.SETTLED
            self._stop_timers()
            self._decode.settled(self, outcome)

    def _hang_up(self, last: Frame) -> None:
        """Say how it ended. What P does not hear, its lease ends."""
        if self._control is not None:
            self._control.send(last.serialize())
            self._control.close()
            self._control = None
        self._stop_timer(self._timers.ack)
        self._stop_timer(self._timers.deadline)
        self._timers.ack = self._timers.deadline = None

    # --- control ---

    def _connect(self, frame: Frame) -> None:
        decode = self._decode
        self.streams += 1
        self._answered = False
        name = f"control{self.session:x}.{self.streams}"
        stream = decode.net.open(name, lane=False)
        end = self._control = stream.ends[0]
        end.on_message = partial(self._on_control, end)
        end.on_end = partial(self._control_over, end)
        decode.connect(stream)
        end.send(frame.serialize())

    def _on_control(self, end: End, data: bytes) -> None:
        machine = self.machine
        if end is not self._control or machine is None:
            return
        frames = read_frames(end, data)
        if not frames:
            return
        self._answered = True
        try:
            for frame in frames:
                machine.receive(frame)
                if frame.type is FrameType.ACCEPT:
                    self._accepted()
                elif frame.type is FrameType.ERROR:
                    self._enter("last frames")
        except PrfaasError as exc:
            self._failed(exc)
        self._complete()

    def _accepted(self) -> None:
        machine = self.machine
        if machine is None or self._phase not in ("connect", "queue"):
            return
        if machine.state is ReceiveState.QUEUED:
            self._enter("queue")
        else:
            self._enter("first_frame")
            self._ask()
        self.ack_soon(0.0)

    def _control_over(self, end: End) -> None:
        if end is not self._control or self.machine is None:
            return
        self._control = None
        if self.machine.ended or self.machine.failure is not None:
            return
        self._tries = 1 if self._answered else self._tries + 1
        if self._tries > self._options.resume_tries:
            self._failed(PeerUnavailable("the control stream cannot be opened again"))
            return
        pause_s = RESUME_FIRST_S * 2 ** (self._tries - 1)
        self._later(pause_s, self._resume, self.epoch)

    def _resume(self, epoch: int) -> None:
        machine = self.machine
        if machine is None or epoch != self.epoch or machine.ended or self._control is not None:
            return
        self._connect(machine.resume(self._decode.open_lanes, self._decode.opened))

    # --- KV ---

    def on_kv(self, frame: Frame) -> None:
        """A KV frame of this session came on a lane."""
        machine = self.machine
        if machine is None or self.state is not FetchState.RECEIVING:
            self._decode.late_frames += 1
            return
        try:
            arrival = machine.receive(frame)
        except PrfaasError as exc:
            self._failed(exc)
            return
        if arrival is None:
            return
        if self._phase in ("connect", "queue"):
            self._accepted()  # a lane was faster than the stream that carries ACCEPT
        if machine.failure is None:
            self._enter("progress")
        self._phase_s = self._sim.now_s
        self.decoding += 1
        pause_s = self._options.decode_s * self._sim.random.uniform(0.2, 3.0)
        self._sim.after(pause_s, self._decoded, machine, arrival)

    def _decoded(self, machine: ReceiveSession, arrival: Arrival) -> None:
        if self._forgotten:
            return
        self.decoding -= 1
        frame, piece = arrival.frame, arrival.piece
        try:
            if not frame.intact:
                self.broken_bytes += frame.wire_bytes
                machine.broken(arrival, CorruptKv("payload crc mismatch"))
            else:
                place = self._sink.in_place(piece)
                if place is None:
                    raise CorruptKv(f"{piece} has no place")
                codec = CODECS.by_id(frame.codec)
                item_bytes = self._decode.layout.groups[piece.group].item_bytes
                codec.decode_into(memoryview(frame.payload), place, item_bytes)
                machine.decoded(arrival, piece_digest(place))
                self.came.append((piece.chunk, piece.layer))
                self._verified(machine)
        except PrfaasError as exc:
            self._failed(exc)
        self._conclude()
        self._complete()

    def _verified(self, machine: ReceiveSession) -> None:
        busy = machine.unacked_bytes >= machine.credit_bytes / 8
        self.ack_soon(0.0 if machine.has_missing or busy else ACK_BUSY_S)
        if self._on_demand and not machine.expecting and not machine.ended and not self._asking:
            self._asking = True
            pause_s = self._options.think_s * self._sim.random.uniform(0.5, 1.5)
            self._later(pause_s, self._ask, self.epoch)

    def _ask(self, epoch: int | None = None) -> None:
        """The next question whose answer is not here yet."""
        machine = self.machine
        if not self._on_demand or machine is None or epoch not in (None, self.epoch):
            return
        self._asking = False
        while self._questions:
            if machine.want(*self._questions.pop(0)):
                self._phase_s = self._sim.now_s
                self._watch()
                self.ack_soon(0.0)
                return

    # --- timers ---

    def ack_soon(self, delay_s: float) -> None:
        """An ACK leaves within this."""
        at_s = self._sim.now_s + delay_s
        timers = self._timers
        if self._phase == "connect" or self._control is None:
            return
        if timers.ack is None or timers.ack_at_s > at_s:
            self._stop_timer(timers.ack)
            timers.ack_at_s = at_s
            timers.ack = self._sim.after(delay_s, self._ack)

    def _ack(self) -> None:
        self._timers.ack = None
        machine, decode = self.machine, self._decode
        if machine is None or machine.ended or self._control is None:
            return
        machine.grant(decode.share_bytes)
        self._control.send(machine.ack(0.0, decode.open_lanes, decode.opened).serialize())
        self.ack_soon(min(ACK_S, machine.lease_s / 3))

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._phase_s = self._sim.now_s
        self._watch()

    def _watch(self) -> None:
        """Look again when the phase's time is over; nothing is owed while nothing is asked for."""
        machine = self.machine
        self._stop_timer(self._timers.deadline)
        if machine is None or machine.ended:
            return
        limits = {
            "connect": self._options.connect_s,
            "queue": self._options.queue_s,
            "first_frame": self._options.first_frame_s,
            "progress": self._options.progress_s,
            "last frames": LAST_FRAMES_S,
        }
        left_s = self._phase_s + limits[self._phase] - self._sim.now_s
        if left_s > 1e-9 or not machine.expecting:
            again_s = max(left_s, limits[self._phase] / 2)
            self._timers.deadline = self._sim.after(again_s, self._watch)
        else:
            phase = self._phase
            self._failed(machine.failure or PrefillTimeout(f"silent in {phase}", phase=phase))

    def _later(self, delay_s: float, call: object, *args: object) -> None:
        self._timers.other.append(self._sim.after(delay_s, call, *args))  # type: ignore[arg-type]

    def _stop_timers(self) -> None:
        for timer in (self._timers.ack, self._timers.deadline, *self._timers.other):
            self._stop_timer(timer)

    def _stop_timer(self, timer: Timer | None) -> None:
        if timer is not None:
            timer.cancel()
