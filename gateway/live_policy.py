"""The policies of a running gateway: the active one, a canary beside it, one in their shadow.

Their files are looked at while the gateway runs: a good one takes over between two decisions, a bad
one is told and changes nothing, and a policy that fails is taken back.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prfaas.errors import ConfigError
from prfaas.interfaces import LearningPolicy, RoutingPolicy
from prfaas.late_binding import BindsLate
from prfaas.queue_settings import QueueSettings
from prfaas.settings import GatewaySettings, PolicySettings
from prfaas.snapshot import Decision, Outcome, RequestFacts, Snapshot, Target
from prfaas.values import Value

logger = logging.getLogger(__name__)

MakePolicy = Callable[[PolicySettings], RoutingPolicy[Any]]
Effective = Callable[[PolicySettings], PolicySettings]
"""Settings with a policy file read."""
Parameters = Mapping[str, Any]
"""Of a policy, those that are not the defaults."""
_Told = tuple[Parameters | None, QueueSettings | None]
"""What settings say beside the policy itself, as `Running` has it."""

LOOK_S = 1.0
"""Between two looks at the files."""
ACTIVE, CANARY = "active", "canary"


class Running:
    """One policy with its state; `decide` and `observe` as in `RoutingPolicy`."""

    def __init__(
        self,
        policy: RoutingPolicy[Any],
        version: int,
        parameters: Parameters | None = None,
        queue: QueueSettings | None = None,
    ) -> None:
        self.policy = policy
        self.parameters = parameters
        """For the log; None: nobody here can tell."""
        self.queue = queue
        """Order in which requests wait in the gateway; None: the policy says nothing of it."""
        self.version = version
        """Grows with each policy that took its place."""
        self.state = policy.initial_state()
        self.move_gain_s = policy.move_gain_s if isinstance(policy, BindsLate) else None
        """What a request that waits must gain to move; None: none does."""
        self._learner = policy if isinstance(policy, LearningPolicy) else None

    def decide(self, facts: RequestFacts, snapshot: Snapshot) -> Decision:
        decision = self.policy.decide(facts, snapshot, self.state)
        if self._learner is not None:
            self.state = self._learner.saw(self.state, facts, snapshot)
        return decision

    def observe(self, outcome: Outcome) -> None:
        self.state = self.policy.observe(self.state, outcome)


@dataclass(frozen=True, slots=True)
class Shadow:
    """What the shadow policy would have done."""

    policy: str
    target: Target
    plan: tuple[tuple[str, str], ...]
    agrees: bool
    saved_s: float | None
    """Estimated TTFT that it would have saved (negative: lost); None where nobody estimates."""


class Chosen(Value, frozen=True):
    """A decision and who made it."""

    decision: Decision
    role: str
    policy: str
    version: int
    state: object
    """Of the policy when it decided."""
    parameters: Parameters | None = None
    """Of the policy, those that are not the defaults; None: nobody can tell."""
    shadow: Shadow | None = None


class PolicyEvents(Protocol):
    """What metrics want to hear."""

    def policy_changed(self, role: str, result: str) -> None:
        """`loaded`, `refused` or `rolled_back`."""
        ...


class LivePolicy:
    """Owns the policies and their states. `run` follows their files until it is cancelled."""

    def __init__(
        self,
        settings: GatewaySettings,
        active: RoutingPolicy[Any],
        make: MakePolicy | None,
        events: PolicyEvents,
        effective: Effective | None = None,
    ) -> None:
        """`make` makes a policy, from its file where settings name one; `effective` reads such
        files for the log. Raises ConfigError.
        """
        self._make = make
        self._effective = effective
        self._events = events
        self._settings: dict[str, PolicySettings] = {ACTIVE: settings.policy}
        self._share = settings.canary_share
        self._running = {ACTIVE: Running(active, 1, *self._told(settings.policy))}
        self._before: dict[str, Running] = {}
        """What ran before the last change, to go back to."""
        for role, chosen in ((CANARY, settings.canary), ("shadow", settings.shadow)):
            if chosen is not None:
                self._settings[role] = chosen
                self._running[role] = Running(self._made(chosen), 1, *self._told(chosen))
        self._published: str | None = None
        self._stamps = {role: _stamp(chosen.file) for role, chosen in self._settings.items()}

    def __repr__(self) -> str:
        names = ", ".join(
            f"{role}={running.policy.name}/{running.version}"
            for role, running in self._running.items()
        )
        return f"<LivePolicy {names}>"

    @property
    def queue(self) -> QueueSettings | None:
        """Order in which requests wait, where the active policy's file has one."""
        return self._running[ACTIVE].queue

    def running(self, role: str) -> Running | None:
        return self._running.get(role)

    def decide(self, facts: RequestFacts, snapshot: Snapshot, key: str) -> Chosen:
        """By the active policy, or for a share of all keys by the canary."""
        role = CANARY if CANARY in self._running and _share_of(key) < self._share else ACTIVE
        running = self._running[role]
        state = running.state
        try:
            decision = running.decide(facts, snapshot)
        except Exception:
            running = self._roll_back(role)
            state = running.state
            decision = running.decide(facts, snapshot)
        return Chosen(
            decision,
            role,
            running.policy.name,
            running.version,
            state,
            running.parameters,
            self._in_shadow(facts, snapshot, decision),
        )

    def observe(self, role: str, outcome: Outcome) -> None:
        """What became of a transfer that this role has decided; the shadow hears of all."""
        for each in {role, "shadow"}:
            running = self._running.get(each)
            if running is None:
                continue
            try:
                running.observe(outcome)
            except Exception:
                if each == ACTIVE and ACTIVE not in self._before:
                    logger.exception("policy %s cannot learn from an outcome", running.policy.name)
                else:
                    self._roll_back(each)

    async def run(self) -> None:
        """Follow the files until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take over what has changed, where it is good."""
        for role, chosen in self._settings.items():
            if chosen.file is None or self._make is None:
                continue
            stamp = await asyncio.to_thread(_stamp, chosen.file)
            if stamp == self._stamps[role]:
                continue
            self._stamps[role] = stamp
            try:
                policy = await asyncio.to_thread(self._made, chosen)
                told = await asyncio.to_thread(self._told, chosen)
            except ConfigError as exc:
                logger.error("the %s policy stays as it is: %s", role, exc.message)
                self._events.policy_changed(role, "refused")
                continue
            old = self._running[role]
            self._before[role] = old
            self._running[role] = Running(policy, old.version + 1, *told)
            logger.info("the %s policy is %s, version %d", role, policy.name, old.version + 1)
            self._events.policy_changed(role, "loaded")
            if role == ACTIVE:
                self._published = await asyncio.to_thread(_text_of, chosen.file)

    def published(self) -> str | None:
        """Text of the active policy's file, if it was taken over since this was last asked."""
        text, self._published = self._published, None
        return text

    async def adopt(self, text: str) -> None:
        """Take over as the active policy what another gateway has taken over, where it is good."""
        if self._make is None:
            return
        old = self._running[ACTIVE]
        try:
            policy, told = await asyncio.to_thread(self._of_text, text)
        except ConfigError as exc:
            logger.error("the policy of another gateway is not taken over: %s", exc.message)
            self._events.policy_changed(ACTIVE, "refused")
            return
        self._before[ACTIVE] = old
        self._running[ACTIVE] = Running(policy, old.version + 1, *told)
        logger.info("the active policy is %s, of another gateway", policy.name)
        self._events.policy_changed(ACTIVE, "loaded")

    def _of_text(self, text: str) -> tuple[RoutingPolicy[Any], _Told]:
        with tempfile.TemporaryDirectory(prefix="prfaas-policy-") as folder:
            file = Path(folder) / "policy.yaml"
            file.write_text(text)
            settings = PolicySettings(file=file)
            return self._made(settings), self._told(settings)

    def _made(self, settings: PolicySettings) -> RoutingPolicy[Any]:
        if self._make is None:
            raise ConfigError(
                "gateway.canary, gateway.shadow: nothing here makes policies", field="gateway"
            )
        return self._make(settings)

    def _told(self, settings: PolicySettings) -> _Told:
        if self._effective is not None:
            settings = self._effective(settings)
        if settings.file is not None:
            return None, None
        hidden = {"name", "queue"}
        dumped = settings.model_dump(mode="json", exclude_defaults=True, exclude=hidden)
        return dumped, settings.queue

    def _roll_back(self, role: str) -> Running:
        """To what ran before; from the others to the active one, without them. Raises what there
        was to raise where there is nothing to go back to.
        """
        failed = self._running[role]
        before = self._before.pop(role, None)
        if before is None and role == ACTIVE:
            raise
        logger.exception("the %s policy %s failed and is taken back", role, failed.policy.name)
        self._events.policy_changed(role, "rolled_back")
        if before is None:
            del self._running[role]
            return self._running[ACTIVE]
        self._running[role] = before
        return before

    def _in_shadow(
        self, facts: RequestFacts, snapshot: Snapshot, decision: Decision
    ) -> Shadow | None:
        running = self._running.get("shadow")
        if running is None:
            return None
        try:
            other = running.decide(facts, snapshot)
        except Exception:
            self._roll_back("shadow")
            return None
        agrees = (decision.target, decision.plan[:1]) == (other.target, other.plan[:1])
        ours, theirs = _ttft_of(decision, other), _ttft_of(other, decision)
        saved_s = None if ours is None or theirs is None else ours - theirs
        return Shadow(running.policy.name, other.target, other.plan, agrees, saved_s)


def _ttft_of(decision: Decision, other: Decision) -> float | None:
    """Estimated TTFT of what was decided, by either one's estimates."""
    where = "/".join(decision.plan[0]) if decision.plan else "local"
    for each in (decision, other):
        estimate = each.estimate(where)
        if estimate is not None:
            return estimate.ttft_s
    return None


def _share_of(key: str) -> float:
    """A number in [0, 1) that is the same for the same key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"prfaas-canary").digest()
    return int.from_bytes(digest, "big") / 2**64


def _text_of(file: Path) -> str | None:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    """Changes when the file does; None where there is none."""
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
