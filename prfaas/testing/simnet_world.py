"""Whole transfers in the simulated network: what may happen is drawn from a seed, what must hold is
checked after every event.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from prfaas.errors import EngineUnavailable
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.memory_kv import MemorySource
from prfaas.placement import StagingMap
from prfaas.send_session import SendSession, SendState
from prfaas.session_messages import SessionOpen
from prfaas.testing.simnet import SimNet, Simulation, Weather
from prfaas.testing.simnet_decode import DecodeOptions, SimDecode
from prfaas.testing.simnet_fetch import FetchOptions, FetchState, SimFetch
from prfaas.testing.simnet_prefill import PrefillOptions, SimPrefill

CHUNK_TOKENS = 8
LAYOUT = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0, 2), 2, 4, "bfloat16"),
        LayerGroup(GroupKind.FULL, (1,), 1, 8, "float32"),
        LayerGroup(GroupKind.RECURRENT, (3,), 2, 4, "float32", state_dim=8),
    )
)
"""States travel after every third chunk."""
SLACK_S = 5.0
FAULTS = ("cut lane", "cut control", "cut all", "abort", "engine", "restart P", "restart D")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One fetch, and when it begins."""

    at_s: float
    tokens: int
    on_demand: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything about a run but its chances."""

    transfers: tuple[Transfer, ...] = (Transfer(0.0, 60),)
    weather: Weather = field(default_factory=Weather)
    faults: tuple[tuple[float, str], ...] = ()
    """(when, one of FAULTS or "silence", after which nothing arrives any more)."""
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    decode: DecodeOptions = field(default_factory=DecodeOptions)


class World:
    """P and D over one link. `run` to its end, or to the first promise that is broken
    (AssertionError); `log` is the same for the same seed and scenario.
    """

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.scenario = scenario
        self.sim = Simulation(seed)
        self.net = SimNet(self.sim, scenario.weather)
        self.p = SimPrefill(self.sim, LAYOUT, CHUNK_TOKENS, self._source, scenario.prefill)
        self.p.on_ended = self._ended
        self.complete: dict[int, SimFetch] = {}
        self.fetched: dict[int, SimFetch] = {}
        self.outcomes: dict[str, str] = {}
        self.lost = 0
        """Fetches that went with their D."""
        self._kv: dict[str, StagingMap] = {}
        self._most_credit = 0
        self._lanes_before = 0
        self.d = self._new_decode()
        for number, transfer in enumerate(scenario.transfers):
            self.sim.after(transfer.at_s, self._begin, number, transfer)
        for at_s, fault in scenario.faults:
            self.sim.after(at_s, self._strike, fault)

    @property
    def log(self) -> bytes:
        return "".join(self.sim.log).encode()

    @property
    def resent_bytes(self) -> int:
        return sum(machine.resent_bytes for machine in self.p.ended)

    def run(self) -> None:
        """Until nothing is left to happen, which is soon after the last deadline."""
        options = self.scenario.decode.fetch
        last_s = max(transfer.at_s for transfer in self.scenario.transfers)
        limit_s = last_s + options.total_s + self.scenario.prefill.lease_s + SLACK_S
        over = self.sim.run(limit_s, self.check)
        assert over, f"something still waits after {limit_s} s"
        assert not self.d.fetches
        assert not self.p.sessions
        assert (self.d.staging_bytes, self.p.reserved_bytes) == (0, 0)
        assert len(self.outcomes) + self.lost == len(self.scenario.transfers)

    def check(self) -> None:
        """What holds at any moment."""
        p, d = self.p, self.d
        holding = [fetch for fetch in d.fetches.values() if fetch.holds_staging]
        assert d.staging_bytes == sum(fetch.nbytes for fetch in holding)
        assert d.staging_bytes <= self.scenario.decode.staging_bytes
        for fetch in d.fetches.values():
            assert fetch.holds_staging == (fetch.state is not FetchState.WAITING)
            assert not (fetch.decoding and fetch.state is FetchState.STAGED)
        assert p.reserved_bytes == sum(s.reserved_bytes for s in p.sessions.values())
        assert p.reserved_bytes <= self.scenario.prefill.retention_bytes
        for served in p.sessions.values():
            machine = served.machine
            self._most_credit = max(self._most_credit, machine.credit_bytes)
            assert 0 <= machine.retained_bytes <= served.reserved_bytes
            assert 0 <= machine.outstanding_bytes <= self._most_credit
            assert not machine.ended

    # --- what happens ---

    def _begin(self, number: int, transfer: Transfer) -> None:
        session, transfer_id = 0x1000 + number, f"t{number}"
        nbytes = LAYOUT.session_bytes(0, transfer.tokens)
        rng = np.random.default_rng(number)
        values = rng.integers(0, 256, nbytes, dtype=np.uint8)
        values[1::2] = number  # half of it compresses
        kv = StagingMap(LAYOUT, 0, transfer.tokens, CHUNK_TOKENS, values)
        self._kv[transfer_id] = kv
        fetch = self.d.fetch(transfer_id, session, kv, on_demand=transfer.on_demand)
        self.fetched[session] = fetch

    def _source(self, request: SessionOpen) -> MemorySource:
        return MemorySource(self._kv[request.transfer_id], request.send_from, cached=False)

    def _strike(self, fault: str) -> None:
        self.sim.note(f"fault: {fault}")
        streams = self.net.streams
        rng = self.sim.random
        if fault == "silence":
            self.net.silent = True
        elif fault == "abort":
            if self.d.fetches:
                self.d.fetches[rng.choice(sorted(self.d.fetches))].abort()
        elif fault == "engine":
            self.p.fail_engine(EngineUnavailable("gone"))
        elif fault == "cut lane":
            lanes = [stream for stream in streams if stream.lane]
            if lanes:
                rng.choice(lanes).cut()
        else:
            for stream in streams:
                if fault != "cut control" or not stream.lane:
                    stream.cut()
            if fault == "restart P":
                self.p.restart()
            elif fault == "restart D":
                self.lost += len(self.d.fetches)
                self.d.die()
                self._lanes_before = self.d.opened
                self.d = self._new_decode()
                self._stop_if_over()

    def _new_decode(self) -> SimDecode:
        decode = SimDecode(
            self.sim,
            self.net,
            self.p.connect,
            LAYOUT,
            CHUNK_TOKENS,
            self.scenario.decode,
            first_lane=self._lanes_before,
        )
        decode.on_complete = self._completed
        decode.on_settled = self._settled
        return decode

    # --- what must hold then ---

    def _completed(self, fetch: SimFetch) -> None:
        machine = fetch.machine
        assert fetch.session not in self.complete, "completed twice"
        assert machine is not None
        assert machine.ledger.whole
        assert fetch.decoding == 0
        assert machine.pending_bytes == 0
        self.complete[fetch.session] = fetch

    def _settled(self, fetch: SimFetch, outcome: str) -> None:
        assert fetch.transfer_id not in self.outcomes, "settled twice"
        self.outcomes[fetch.transfer_id] = outcome
        assert fetch.decoding == 0
        assert (outcome == "staged") == (fetch.session in self.complete)
        if outcome == "staged" or outcome.startswith("partial"):
            assert fetch.watermark > 0
            for extent in LAYOUT.extents(0, fetch.watermark, CHUNK_TOKENS):
                place = slice(extent.offset, extent.offset + extent.nbytes)
                expected = self._kv[fetch.transfer_id].tensor(extent).reshape(-1)
                assert fetch.buffer[place].tobytes() == expected.tobytes()
        self._stop_if_over()

    def _stop_if_over(self) -> None:
        if len(self.outcomes) + self.lost == len(self.scenario.transfers):
            self.d.stop()

    def _ended(self, machine: SendSession) -> None:
        """P forgets a session: nothing of it is in flight, and success is the other side's too."""
        assert (machine.outstanding_bytes, machine.retained_bytes) == (0, 0)
        assert (machine.queued, machine.lanes_used, machine.sendable) == (0, (), False)
        fetch = self.fetched[machine.session]
        if machine.state is SendState.COMPLETE:
            assert machine.session in self.complete
            theirs = fetch.machine
            assert theirs is not None
            assert theirs.ledger.root_digest() == machine.ledger.root_digest()
        bound = self.d.opened * self._most_credit + fetch.broken_bytes * fetch.streams
        assert machine.resent_bytes <= bound, (machine.resent_bytes, bound)


def random_scenario(seed: int, *, calm: bool = False) -> Scenario:
    """Weather, sizes, both orders and faults; `calm`: nothing that may end a transfer."""
    rng = np.random.default_rng(seed)

    def pick(*values: float) -> float:
        return float(rng.choice(values))

    transfers = tuple(
        Transfer(float(rng.uniform(0, 2)), int(rng.integers(1, 80)), bool(rng.random() < 0.5))
        for _ in range(int(rng.integers(1, 5)))
    )
    largest = max(LAYOUT.session_bytes(0, transfer.tokens) for transfer in transfers)
    weather = Weather(
        latency_s=pick(0.001, 0.02, 0.1),
        jitter_s=pick(0.0, 0.05),
        bytes_per_s=pick(20e3, 200e3, 10e6),
        loss=pick(0.0, 0.1),
        duplicate=pick(0.0, 0.1),
        corrupt=pick(0.0, 0.0, 0.05),
        cut=pick(0.0, 0.0, 0.01, 0.05),
    )
    known = FAULTS[:3] if calm else FAULTS
    faults = tuple(
        (float(rng.uniform(0, 3)), str(rng.choice(known))) for _ in range(int(rng.integers(0, 4)))
    )
    if not calm and rng.random() < 0.1:
        faults += ((float(rng.uniform(0, 3)), "silence"),)
    fetch = FetchOptions(decode_s=pick(0.0005, 0.01), think_s=pick(0.001, 0.2))
    if calm:
        patience_s = 100.0
        fetch = replace(
            fetch, connect_s=patience_s, queue_s=patience_s, first_frame_s=patience_s,
            progress_s=patience_s, total_s=4 * patience_s, resume_tries=50, lost_retries=20,
        )  # fmt: skip
    return Scenario(
        transfers=transfers,
        weather=weather,
        faults=faults,
        prefill=PrefillOptions(
            retention_bytes=int(largest * pick(1.0, 1.5, 4.0)), tensor_s=pick(0.0005, 0.02)
        ),
        decode=DecodeOptions(
            staging_bytes=int(largest * pick(1.0, 2.0, 4.0)),
            lanes=int(rng.integers(1, 5)),
            window_bytes=int(pick(0, 2048, 1 << 20)),
            fetch=fetch,
        ),
    )


def outcomes_of(world: World) -> Counter[str]:
    """How often each first word of an outcome."""
    return Counter(outcome.split()[0] for outcome in world.outcomes.values())
