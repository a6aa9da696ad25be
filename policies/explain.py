"""Why a logged decision went as it did: it is replayed, and each input moved until it flips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from policies.inputs import Input, inputs_of
from policies.parameters import SPANS
from policies.registry import make_policy
from prfaas.errors import ConfigError
from prfaas.interfaces import RoutingPolicy
from prfaas.late_binding import Move
from prfaas.settings import PolicySettings, validation_message
from prfaas.snapshot import Decision, Reason, RequestFacts, Snapshot, Target

STEPS_PER_DOUBLING = 4
"""Values tried on the way up and down; between two of them a flip there and back is not seen."""
PRECISION = 1e-3
"""To which the value of a flip is found."""
OVERRIDDEN = (Reason.OFFLOAD_OFF, Reason.FORCED_REMOTE)
"""The gateway put these in the place of what its policy said."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One line of the gateway's request log, as far as it concerns the decision."""

    request_id: str
    policy: str
    state: Any
    parameters: Mapping[str, Any] | None
    """Of the policy, those that are not the defaults; None: the log does not say."""
    facts: RequestFacts
    snapshot: Snapshot
    decision: Decision
    """The first one."""
    moves: tuple[Move, ...] = ()
    """Where the request went after it, while it waited."""


@dataclass(frozen=True, slots=True)
class Flip:
    """The nearest value of one input that sends the request elsewhere."""

    name: str
    unit: str
    now: float
    at: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class Explanation:
    """A replayed decision, and what would have changed it."""

    logged: Logged
    replayed: Decision
    flips: tuple[Flip, ...]
    firm: tuple[str, ...]
    """Inputs that change nothing, whatever they are, while all else stays."""

    @property
    def same(self) -> bool:
        """Whether the replay went where the log says the request went."""
        return _place(self.replayed) == _place(self.logged.decision)


def read_log(path: Path) -> Iterator[Logged]:
    """Lines with a decision, in order; others are passed over. Raises ConfigError for a file that
    cannot be read, and for lines that are no request log's."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                start = line.find("{")
                if start < 0:
                    continue
                try:
                    row = msgspec.json.decode(line[start:])
                except msgspec.DecodeError:
                    continue  # other log lines may hold a brace
                if isinstance(row, dict) and isinstance(row.get("request"), dict):
                    row = row["request"]  # of a log in JSON
                if not isinstance(row, dict) or not row.get("decision"):
                    continue
                yield _logged(row, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not text: {error.reason}") from error


def find(path: Path, request_id: str | None) -> Logged:
    """The decision of that request, the latest where its id came more than once; without an id the
    last of the file. Raises ConfigError where there is none."""
    found: Logged | None = None
    for logged in read_log(path):
        if request_id is None or logged.request_id == request_id:
            found = logged
    if found is None:
        what = "no line with a decision" if request_id is None else f"no decision of {request_id!r}"
        raise ConfigError(f"{path}: {what}")
    return found


def settings_of(logged: Logged) -> PolicySettings:
    """The policy with its parameters as they were logged, or with the defaults where they were not.

    Raises ConfigError for parameters that this version does not know.
    """
    data = {"name": logged.policy, **(logged.parameters or {})}
    try:
        return PolicySettings.model_validate(data)
    except ValidationError as error:
        raise ConfigError(
            f"request {logged.request_id}: {validation_message(error, 'policy_parameters')}"
        ) from error


def explain(logged: Logged, settings: PolicySettings) -> Explanation:
    """Replay the decision with the policy of `settings`, and move each input alone until the
    request goes elsewhere. Raises ConfigError where the logged state is not that policy's."""
    policy = make_policy(settings)
    state = _state(policy, logged)
    replayed = policy.decide(logged.facts, logged.snapshot, state)
    flips: list[Flip] = []
    firm: list[str] = []
    for moved in (*inputs_of(logged.facts, logged.snapshot), *_parameters(settings)):
        found = list(_flips(moved, logged, settings, state, replayed))
        flips.extend(found)
        if not found:
            firm.append(moved.name)
    return Explanation(logged, replayed, tuple(flips), tuple(firm))


def _flips(
    moved: Input, logged: Logged, settings: PolicySettings, state: Any, replayed: Decision
) -> Iterator[Flip]:
    usual = make_policy(settings)

    def decide(value: float) -> Decision:
        facts, snapshot = logged.facts, logged.snapshot
        policy = usual
        if moved.parameter is not None:
            policy = make_policy(settings.model_copy(update={moved.parameter: moved.as_is(value)}))
        else:
            facts, snapshot = moved.put(facts, snapshot, value)
        return policy.decide(facts, snapshot, state)

    for path in moved.paths(STEPS_PER_DOUBLING):
        flip = _first_flip(path, moved, decide, _place(replayed))
        if flip is not None:
            at, decision = flip
            yield Flip(moved.name, moved.unit, moved.now, at, decision)


def _first_flip(
    path: Iterator[float],
    moved: Input,
    decide: Callable[[float], Decision],
    place: tuple[Target, tuple[str, str] | None],
) -> tuple[float, Decision] | None:
    """The value nearest to the present one on that path that sends the request elsewhere."""
    before = moved.now
    for value in path:
        decision = decide(value)
        if _place(decision) == place:
            before = value
            continue
        while abs(value - before) > max(moved.grain, PRECISION * abs(value)):
            middle = moved.as_is((value + before) / 2)
            if middle in (value, before):
                break
            other = decide(middle)
            if _place(other) == place:
                before = middle
            else:
                value, decision = middle, other
        return value, decision
    return None


def _place(decision: Decision) -> tuple[Target, tuple[str, str] | None]:
    """Where a request goes first; the rest of a plan is for failures."""
    return decision.target, decision.plan[0] if decision.plan else None


def _parameters(settings: PolicySettings) -> Iterator[Input]:
    for name, span in SPANS[settings.name].items():
        now = getattr(settings, name)
        if now is not None and name != "move_gain_s":  # that one moves what waits, later
            grain = 1.0 if span.whole else 1e-3
            yield Input(f"policy {name}", "", float(now), span.low, span.high, grain,
                        parameter=name)  # fmt: skip


def _state(policy: RoutingPolicy[Any], logged: Logged) -> Any:
    """The logged state where it is this policy's; another policy starts with its initial one."""
    initial = policy.initial_state()
    if logged.policy != policy.name or initial is None:
        return initial
    try:
        return msgspec.convert(logged.state, type(initial))
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"request {logged.request_id}: the logged state is not {policy.name}'s: {error}"
        ) from error


def _logged(row: Mapping[str, Any], where: str) -> Logged:
    try:
        facts = msgspec.convert(row.get("facts"), RequestFacts)
        snapshot = msgspec.convert(row.get("snapshot"), Snapshot)
        decision = msgspec.convert(row.get("decision"), Decision)
        name = msgspec.convert(row.get("policy"), str)
        request_id = msgspec.convert(row.get("request_id"), str)
        moves = msgspec.convert(row.get("moves") or (), tuple[Move, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: not a line that this version wrote: {error}") from error
    parameters = row.get("policy_parameters")
    state = row.get("policy_state")
    return Logged(request_id, name, state, parameters, facts, snapshot, decision, moves)
