"""D in the simulated network: staging, lanes opened again, fetches that resume or fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prfaas.frames import HEADER_BYTES, Frame, FrameType
from prfaas.layout import KvLayout
from prfaas.placement import StagingMap
from prfaas.rpc import convert
from prfaas.session_messages import LaneAttach
from prfaas.testing.simnet import SimNet, Simulation, Stream, Timer, read_frames
from prfaas.testing.simnet_fetch import FetchOptions, FetchState, SimFetch

LANE_RETRY_S = 0.05
LINK = b"link"


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What D has, and how its fetches behave."""

    staging_bytes: int = 1 << 20
    lanes: int = 3
    window_bytes: int = 1 << 20
    fetch: FetchOptions = field(default_factory=FetchOptions)


class SimDecode:
    """Owns lanes, staging and fetches; `stop` when nothing more is wanted of it."""

    def __init__(
        self,
        sim: Simulation,
        net: SimNet,
        connect: Callable[[Stream], None],
        layout: KvLayout,
        chunk_tokens: int,
        options: DecodeOptions,
        *,
        first_lane: int = 0,
    ) -> None:
        """`first_lane`: beyond all numbers of a D before, as P tells links apart by them here."""
        self.sim = sim
        self.net = net
        self.connect = connect
        self.layout = layout
        self.chunk_tokens = chunk_tokens
        self.options = options
        self.fetches: dict[int, SimFetch] = {}
        """Not settled yet, by session."""
        self.outcomes: list[tuple[str, str]] = []
        """(transfer id, outcome), as they settle."""
        self.on_complete: Callable[[SimFetch], None] = lambda fetch: None
        self.on_settled: Callable[[SimFetch, str], None] = lambda fetch, outcome: None
        self.staging_bytes = 0
        """In use."""
        self.open_lanes: dict[int, None] = {}
        self.opened = first_lane
        self.late_frames = 0
        self._attaching: dict[int, Timer] = {}
        self._stopped = False
        for _ in range(options.lanes):
            self._open_lane()

    # --- fetches ---

    def fetch(self, transfer_id: str, session: int, kv: StagingMap, *, on_demand: bool) -> SimFetch:
        """Bring all of `kv`, which P has; the fetch reports by itself."""
        fetch = SimFetch(self, transfer_id, session, kv, on_demand=on_demand)
        self.fetches[session] = fetch
        self.sim.note(f"D fetches {transfer_id} s={session:x} tokens={kv.end}")
        self.admit()
        return fetch

    def admit(self) -> None:
        """Staging in the order of the fetches."""
        for fetch in list(self.fetches.values()):
            if fetch.state is FetchState.WAITING:
                if self.staging_bytes + fetch.nbytes > self.options.staging_bytes:
                    return
                self.staging_bytes += fetch.nbytes
                fetch.start()

    def settled(self, fetch: SimFetch, outcome: str) -> None:
        """For fetches: nothing of it is in flight any more."""
        del self.fetches[fetch.session]
        self.outcomes.append((fetch.transfer_id, outcome))
        self.sim.note(f"D settles {fetch.transfer_id}: {outcome}")
        if fetch.holds_staging:
            self.staging_bytes -= fetch.nbytes
        self.on_settled(fetch, outcome)
        self.admit()

    @property
    def share_bytes(self) -> int:
        """Credit of one session now: never less than its largest frame."""
        tensor_bytes = max(
            max(g.token_bytes * self.chunk_tokens, g.state_bytes) for g in self.layout.groups
        )
        return max(
            HEADER_BYTES + tensor_bytes, self.options.window_bytes // max(1, len(self.fetches))
        )

    def stop(self) -> None:
        """Open no lane again."""
        self._stopped = True
        for timer in self._attaching.values():
            timer.cancel()

    def die(self) -> None:
        """The process is gone, with all it had; whoever calls cuts the streams."""
        self.sim.note("D dies")
        self.stop()
        for fetch in self.fetches.values():
            fetch.forget()
        self.fetches.clear()
        self.staging_bytes = 0

    # --- lanes ---

    def _open_lane(self) -> None:
        if self._stopped:
            return
        number = self.opened
        self.opened += 1
        self.open_lanes[number] = None
        stream = self.net.open(f"lane{number}", lane=True)
        end = stream.ends[0]
        end.on_message = partial(self._attached, number, stream)
        end.on_end = partial(self._lane_over, number)
        limit_s = self.options.fetch.connect_s
        self._attaching[number] = self.sim.after(limit_s, stream.cut)
        self.connect(stream)
        attach = convert.attach_to_bytes(LaneAttach(LINK, number))
        end.send(Frame(FrameType.ATTACH, 0, payload=attach).serialize())

    def _attached(self, number: int, stream: Stream, data: bytes) -> None:
        self._attaching.pop(number).cancel()
        stream.ends[0].on_message = partial(self._on_frames, stream)

    def _lane_over(self, number: int) -> None:
        timer = self._attaching.pop(number, None)
        if timer is not None:
            timer.cancel()
        del self.open_lanes[number]
        for fetch in list(self.fetches.values()):
            fetch.ack_soon(0.0)
        if not self._stopped:
            self.sim.after(LANE_RETRY_S * self.sim.random.uniform(0.5, 2.0), self._open_lane)

    def _on_frames(self, stream: Stream, data: bytes) -> None:
        for frame in read_frames(stream.ends[0], data):
            fetch = self.fetches.get(frame.session)
            if fetch is None:
                self.late_frames += 1
            else:
                fetch.on_kv(frame)
