"""Late binding: a request that waits at one place moves to another one that stands idle.

Until the first event of an answer, the task that serves a request can be told to take it back from
its engine and to send it again, decided anew. Nothing of it has reached the client by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gateway.admission import FallbackBudget
from gateway.cluster_view import ClusterView
from gateway.job import Job
from gateway.live_policy import LivePolicy
from gateway.metrics import GatewayMetrics
from gateway.moves import (
    Ahead,
    Better,
    Decide,
    better_at_a_peer,
    better_at_d,
    idle_peers,
    is_idle,
)
from gateway.records import RequestRecord
from prfaas.clock import Clock
from prfaas.late_binding import LOCAL, LOOKED_AT, MOST_MOVES, Move
from prfaas.snapshot import EngineLoad, RequestFacts, Snapshot

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Between two looks at who waits, while somebody does."""
SETTLE_S = 0.5
"""What was sent so long ago is known to where it was sent, or held up on its way."""


class Moved(Exception):
    """A request has to go elsewhere; nothing of its answer has come."""

    def __init__(self, better: Better) -> None:
        super().__init__("the request moves")
        self.better = better


@dataclass(slots=True)
class Waiting:
    """One request at an engine, of whose answer nothing has come."""

    job: Job
    key: str
    task: asyncio.Task[Any]
    engine: str
    where: str
    """`local`, or `peer/instance`."""
    tokens: int
    """That its place has to compute."""
    sent_at: float
    moving: Better | None = None

    @property
    def queue(self) -> str:
        """Of its place: each engine has its own, engines share those of the peers."""
        return f"{LOCAL}:{self.engine}" if self.where == LOCAL else self.where


class LateBinding:
    """Watches what was sent and has not begun, by the rules of a policy that binds late.

    Owns the list of it, and a timer while it is not empty; close it with `close`. A request that
    has begun stays: it has begun where no tokens are ahead of it in the order in which this gateway
    sent them, and in doubt it has.
    """

    def __init__(
        self,
        policy: LivePolicy,
        view: ClusterView,
        budget: FallbackBudget,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self._policy = policy
        self._view = view
        self._budget = budget
        self._metrics = metrics
        self._now = clock.now
        self._waiting: dict[str, Waiting] = {}
        """By key, in the order in which they were sent."""
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        self._left = 0
        """Requests that may still be compared in this look."""

    def __repr__(self) -> str:
        return f"<LateBinding waiting={len(self._waiting)}>"

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, job: Job, engine: str) -> Waiting | None:
        """A decided request is about to be sent, and `listed` is to follow; None: it will not move,
        whatever happens.
        """
        record = job.record
        decision, snapshot = record.decision, record.snapshot
        if self._gain_s(record) is None or decision is None or snapshot is None:
            return None
        if job.short or not snapshot.remotes:
            return None
        where = "/".join(decision.plan[0]) if record.transfer_id else LOCAL
        estimate = decision.estimate(where)
        tokens = decision.uncached_tokens if estimate is None else estimate.uncached_tokens
        task = asyncio.current_task()
        assert task is not None
        waiting = Waiting(job, record.key, task, engine, where, tokens, self._now())
        self._waiting[record.key] = waiting
        if self._timer is None:
            self._timer = task.get_loop().call_later(LOOK_S, self._tick)
        return waiting

    @contextmanager
    def listed(self, waiting: Waiting) -> Iterator[None]:
        """While it is at its engine. Raises Moved where it has to go elsewhere."""
        try:
            yield
        except asyncio.CancelledError:
            better, waiting.moving = waiting.moving, None
            if better is None or waiting.task.uncancel() > 0:  # somebody else cancelled it
                raise
            self._tell(waiting, better)
            raise Moved(better) from None
        finally:
            self._waiting.pop(waiting.key, None)
            if waiting.moving is not None:  # it has ended at the same moment
                waiting.task.uncancel()

    def begun(self, record: RequestRecord) -> None:
        """Its first event is here: it stays."""
        self._waiting.pop(record.key, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Move what gains: to each place that stands idle at most one, as it is busy then."""
        taken: set[str] = set()
        engines = list(dict.fromkeys(w.engine for w in self._waiting.values()))
        self._left = LOOKED_AT
        self._looks += 1
        first = self._looks % max(1, len(engines))
        for engine in engines[first:] + engines[:first]:
            try:
                self._look_at(engine, taken)
            except Exception:  # what a policy does wrong keeps requests where they are
                logger.exception("cannot say whether what waits for %s should move", engine)

    def _tick(self) -> None:
        self._timer = None
        self.look()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)

    def _look_at(self, engine: str, taken: set[str]) -> None:
        snapshot = self._view.snapshot(engine, {}, self._budget.free_tokens)
        if is_idle(snapshot.local.load, snapshot.max_age_s):
            best = self._best(self._homecomers(engine, snapshot))
        elif any(f"{r.peer}/{r.instance}" not in taken for r in idle_peers(snapshot)):
            best = self._best(self._leavers(engine, snapshot, taken))
        else:
            return
        if best is None:
            return
        waiting, better = best
        if better.decision.plan:
            taken.add("/".join(better.decision.plan[0]))
        waiting.moving = better
        waiting.task.cancel()

    def _tell(self, waiting: Waiting, better: Better) -> None:
        plan, record = better.decision.plan, waiting.job.record
        to = "/".join(plan[0]) if plan else LOCAL
        why = "peer_idle" if plan else "local_idle"
        after_s = self._now() - record.started_at
        move = Move(waiting.where, to, why, after_s, better.stay_s, better.go_s)
        record.moves = (*record.moves, move)
        self._metrics.moves.labels("to_remote" if plan else "to_local").inc()
        logger.info(
            "%s moves from %s to %s (%s): first token in %.3g s, not %.3g s",
            record.request_id, waiting.where, to, why, better.go_s, better.stay_s,
        )  # fmt: skip

    def _best(self, found: Iterator[tuple[Waiting, Better]]) -> tuple[Waiting, Better] | None:
        best: tuple[Waiting, Better] | None = None
        for waiting, better in found:
            gain_s = self._gain_s(waiting.job.record)
            if gain_s is None or better.gain_s <= gain_s:
                continue
            if best is None or better.gain_s > best[1].gain_s:
                best = waiting, better
        return best

    def _leavers(
        self, engine: str, now: Snapshot, taken: set[str]
    ) -> Iterator[tuple[Waiting, Better]]:
        """Who waits at D, with the best of the idle peers."""
        flows = self._flows()
        for waiting, ahead in self._queued(f"{LOCAL}:{engine}", now.local.load):
            facts, snapshot = self._seen(waiting)
            decide = self._decide_of(waiting)
            better = better_at_a_peer(facts, snapshot, ahead, decide, flows, taken)
            if better is not None:
                yield waiting, better

    def _homecomers(self, engine: str, now: Snapshot) -> Iterator[tuple[Waiting, Better]]:
        """Who waits at a peer, or for room for what comes from there, with idle D."""
        flows = self._flows()
        for at, remote in enumerate(now.remotes):
            for waiting, ahead in self._queued(f"{remote.peer}/{remote.instance}", remote.load):
                if waiting.engine != engine:
                    continue
                facts, snapshot = self._seen(waiting)
                decide, others = self._decide_of(waiting), flows[remote.peer] - 1
                better = better_at_d(facts, snapshot, snapshot.remotes[at], ahead, decide, others)
                if better is not None:
                    yield waiting, better

    def _queued(self, queue: str, load: EngineLoad) -> Iterator[tuple[Waiting, Ahead]]:
        """Those that wait in a queue, with what is ahead of each."""
        there = [w for w in self._waiting.values() if w.queue == queue and w.moving is None]
        tokens = load.queue_tokens + load.sent_tokens - sum(waiting.tokens for waiting in there)
        for at, waiting in enumerate(there):
            if self._left <= 0:
                return
            # Until its place tells of it, nobody can say whether the load counts it once or twice.
            waits = tokens > 0 and self._view.sent.is_shown(waiting.key)
            if (waits or self._held_up(waiting)) and self._may_move(waiting):
                self._left -= 1
                yield waiting, Ahead(tokens, max(1, at)) if waits else Ahead(0, 0)
            tokens += waiting.tokens

    def _held_up(self, waiting: Waiting) -> bool:
        """D knows of the transfer and P does not: D has no room yet for what would come."""
        late = self._now() - waiting.sent_at > SETTLE_S
        return waiting.where != LOCAL and late and self._view.sent.only_d_knows(waiting.key)

    def _may_move(self, waiting: Waiting) -> bool:
        """A stream shows when it begins. Another answer does not: it may move only for as long as
        it was to wait in the first place.
        """
        record = waiting.job.record
        if len(record.moves) >= MOST_MOVES or self._gain_s(record) is None:
            return False
        if record.stream:
            return True
        estimate = None if record.decision is None else record.decision.estimate(waiting.where)
        return estimate is not None and self._now() - waiting.sent_at < estimate.queue_s

    def _seen(self, waiting: Waiting) -> tuple[RequestFacts, Snapshot]:
        """The prompt, and all places as they are now with its prefixes."""
        job = waiting.job
        assert job.record.facts is not None
        return job.record.facts, self._view.snapshot(
            waiting.engine, job.prompt.chains, self._budget.free_tokens
        )

    def _decide_of(self, waiting: Waiting) -> Decide:
        """By the policy that decided, of those places where the request may go."""
        running = self._policy.running(waiting.job.record.policy_role)
        assert running is not None
        policy, state, seen = running.policy, running.state, waiting.job.inbound.visit.seen
        return lambda facts, snapshot: policy.decide(facts, seen(snapshot), state)

    def _gain_s(self, record: RequestRecord) -> float | None:
        running = self._policy.running(record.policy_role)
        return None if running is None else running.move_gain_s

    def _flows(self) -> Counter[str]:
        """Transfers under way, by peer."""
        return Counter(w.where.split("/")[0] for w in self._waiting.values() if w.where != LOCAL)
