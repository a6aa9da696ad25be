"""What happened to each request: a bounded history to inspect, and one log line for each."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator

import msgspec

from gateway.live_policy import Parameters, Shadow
from gateway.stages import Mark, Stage, seconds_by_stage, seconds_of, stages_of
from gateway.trace import Trace
from prfaas.clock import Clock
from prfaas.errors import Cancelled, PrfaasError, RateLimited
from prfaas.late_binding import Move
from prfaas.snapshot import Decision, Outcome, RequestFacts, Snapshot, Target

TURN = "turn"
"""Phase of an error where no turn came, and the name of that as a limit."""
MAX_ITL_SAMPLES = 2048
"""Gaps kept of one request; the histogram has them all."""


class RequestRecord(msgspec.Struct):
    """One request from its first byte to its end; times in seconds of the gateway's clock."""

    request_id: str
    api: str
    trace_id: str
    key: str
    """Our own id of it, unlike the client's certain to be unique."""
    started_at: float
    started_wall: float
    trace: Trace | None = None
    """Where its spans are recorded."""
    transfer_id: str = ""
    engine: str = ""
    """The decode engine that it was last sent to."""
    tried: list[str] = msgspec.field(default_factory=list)
    """Engines that it was sent to, in order."""
    recent_tokens: int = 0
    """Of the prompt, sent to that engine shortly before."""
    body_bytes: int = 0
    stream: bool = False
    facts: RequestFacts | None = None
    snapshot: Snapshot | None = None
    policy: str = ""
    policy_state: object = None
    policy_parameters: Parameters | None = None
    """Those that are not the defaults; None: nobody could tell."""
    policy_role: str = ""
    """`active` or `canary`."""
    policy_version: int = 0
    shadow: Shadow | None = None
    """What another policy would have done."""
    decision: Decision | None = None
    decided: tuple[Decision, Snapshot] | None = None
    """What the policy said and saw, where a request has moved since."""
    moves: tuple[Move, ...] = ()
    kv_quality: str = "exact"
    """Class that KV from a peer may have."""
    on_failure: str = ""
    """What the agent was told: `local` where the fallback budget granted it."""
    status: str = ""
    """HTTP status, 499 for a client that left; empty while the request runs."""
    tenant: str = ""
    """Whose key it came with; empty where nobody is told apart."""
    limit: str = ""
    """Which limit of its tenant refused it."""
    error: str = ""
    """Kind of the error, also of one after the commit (then the status is 200)."""
    committed: bool = False
    complete: bool = False
    """The last event of its stream went out to the client."""
    outcome: Outcome | None = None
    first_event_at: float | None = None
    last_event_at: float | None = None
    ended_at: float | None = None
    marks: list[Mark] = msgspec.field(default_factory=list)
    """Stages in the order in which they began."""
    events: int = 0
    itl_s: list[float] = msgspec.field(default_factory=list)

    @property
    def target(self) -> Target:
        """Where it was sent: remote only with a plan in hand."""
        return Target.REMOTE if self.transfer_id else Target.LOCAL

    @property
    def target_name(self) -> str:
        """Of `target`, as labels and headers say it: an enum's `value` costs ten times as much."""
        return "remote" if self.transfer_id else "local"

    @property
    def ttft_s(self) -> float | None:
        """First `data:` event; None for an answer that is not streamed."""
        return None if self.first_event_at is None else self.first_event_at - self.started_at

    @property
    def mean_gap_s(self) -> float | None:
        """Between two events of a stream; None where there were not two."""
        first, last = self.first_event_at, self.last_event_at
        if first is None or last is None or self.events < 2:
            return None
        return (last - first) / (self.events - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.started_at

    def begins(self, stage: str, now: float, engine: str = "") -> None:
        """A stage begins, and the one before it has ended."""
        self.marks.append((stage, now, engine))

    @property
    def stages(self) -> list[Stage]:
        """Of a request that has ended; before that there are none."""
        if self.ended_at is None:
            return []
        return list(stages_of(self.started_at, self.marks, self.first_event_at, self.ended_at))

    def stage_seconds(self) -> Iterable[tuple[str, float]]:
        """The same as names and seconds alone."""
        if self.ended_at is None:
            return ()
        return seconds_of(self.started_at, self.marks, self.first_event_at, self.ended_at)

    def fail(self, error: PrfaasError) -> None:
        """It ends with this error: 499 where the client left before it had its whole stream."""
        if self.complete and isinstance(error, Cancelled):
            self.status, self.error = "200", ""
            return
        self.status, self.error = str(error.http_status), error.kind
        if isinstance(error, RateLimited):
            self.limit = error.param or error.kind
        elif error.phase == TURN:
            self.limit = TURN

    def broke_off(self, error: BaseException) -> None:
        """It ends with whatever this is, which its task goes on with."""
        if isinstance(error, asyncio.CancelledError):
            error = Cancelled("the client went away")
        self.fail(error if isinstance(error, PrfaasError) else PrfaasError("internal error"))

    def completed(self) -> None:
        self.complete = True

    def saw_events(self, count: int, now: float) -> float | None:
        """Count events that arrived together; returns the gap that each of them stands for, in
        seconds, None for the first.
        """
        self.events += count
        last, self.last_event_at = self.last_event_at, now
        if last is None:
            self.first_event_at = now
            return None
        gap = (now - last) / count
        samples = self.itl_s
        room = MAX_ITL_SAMPLES - len(samples)
        if count == 1 and room > 0:
            samples.append(gap)
        elif room > 0:
            samples.extend([gap] * min(count, room))
        return gap

    def saw_gaps(self, gaps_s: list[float], now: float) -> None:
        """Count events after the first, with the gap before each; the last of them came at `now`,
        in seconds.
        """
        self.events += len(gaps_s)
        self.last_event_at = now
        self.itl_s.extend(gaps_s[: MAX_ITL_SAMPLES - len(self.itl_s)])


class RecordBook:
    """Keeps the latest requests, running ones among them; nothing to close.

    A request id that comes again replaces the older request of that name.
    """

    def __init__(self, capacity: int, clock: Clock) -> None:
        self._capacity = capacity
        self._clock = clock
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def open(self, request_id: str, api: str, trace_id: str, key: str) -> RequestRecord:
        record = RequestRecord(
            request_id, api, trace_id, key, self._clock.now(), self._clock.wall()
        )
        self._records.pop(request_id, None)
        self._records[request_id] = record
        while len(self._records) > self._capacity:
            self._records.popitem(last=False)
        return record

    def get(self, request_id: str) -> RequestRecord | None:
        return self._records.get(request_id)

    def latest(self, limit: int) -> Iterator[RequestRecord]:
        """Newest first."""
        for at, record in enumerate(reversed(self._records.values())):
            if at >= limit:
                return
            yield record

    def __len__(self) -> int:
        return len(self._records)


class Summary(msgspec.Struct, gc=False):
    """A record as it is told, without anything of the prompt; enough to replay the decision.

    A struct, as a dict of so many keys costs four times as much to make and to encode.
    """

    request_id: str
    transfer_id: str | None
    trace_id: str
    api: str
    tenant: str | None
    received: float
    stream: bool
    body_bytes: int
    engine: str
    tried: list[str]
    target: str
    kv_quality: str
    decision: Decision | None
    moves: tuple[Move, ...]
    on_failure: str | None
    status: str | None
    error: str | None
    limit: str | None
    ttft_s: float | None
    e2e_s: float | None
    events: int
    outcome: Outcome | None
    policy: str
    policy_state: object
    policy_parameters: Parameters | None
    policy_role: str
    policy_version: int
    shadow: Shadow | None
    facts: RequestFacts | None
    snapshot: Snapshot | msgspec.Raw | None


class Detail(Summary, gc=False):
    """The same with the samples behind it."""

    itl_s: list[float]
    stages_s: dict[str, float]


def summary(record: RequestRecord) -> Summary:
    decision, snapshot = record.decided or (record.decision, record.snapshot)
    return Summary(
        record.request_id,
        record.transfer_id or None,
        record.trace_id,
        record.api,
        record.tenant or None,
        record.started_wall,
        record.stream,
        record.body_bytes,
        record.engine,
        record.tried,
        record.target_name,
        record.kv_quality,
        decision,
        record.moves,
        record.on_failure or None,
        record.status or None,
        record.error or None,
        record.limit or None,
        record.ttft_s,
        record.e2e_s,
        record.events,
        record.outcome,
        record.policy,
        record.policy_state,
        record.policy_parameters,
        record.policy_role,
        record.policy_version,
        record.shadow,
        record.facts,
        snapshot,
    )


def detail(record: RequestRecord) -> Detail:
    return Detail(
        **msgspec.structs.asdict(summary(record)),
        itl_s=record.itl_s,
        stages_s=seconds_by_stage(record.stage_seconds()),
    )
