"""The loop that keeps a gateway in touch with the others. No request ever waits for it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from gateway.cluster_view import ClusterView
from gateway.state.metrics import StateMetrics
from gateway.state.sent_telling import MAX_PAUSE_S, SentTelling
from prfaas.clock import Clock
from prfaas.cluster_state import (
    BucketKey,
    ClusterStore,
    HeardPrefixes,
    LinkSample,
    Member,
    PrefixDelta,
    Report,
    Shared,
    Spend,
)
from prfaas.errors import StateUnavailable
from prfaas.settings import StateSettings
from prfaas.tenants import Tenant

logger = logging.getLogger(__name__)

DOWN_AFTER_S = 1.0
"""It is away after so long without an answer, and after three exchanges at least."""
MAX_LINKS = 256
"""Samples that one gateway tells of."""


class PolicyExchange(Protocol):
    """The live policy, as far as it is shared."""

    def published(self) -> str | None:
        """Text of a file that was taken over since this was last asked."""
        ...

    async def adopt(self, text: str) -> None:
        """Take over what another gateway has; a bad one is told and changes nothing."""
        ...


class Budgets(Protocol):
    """What is told and heard of budgets; `Quotas` is one."""

    def report(self, now: float, *, everything: bool) -> list[Spend]: ...

    def unreport(self, spends: Iterable[Spend]) -> None: ...

    def claims(self, tenants: Iterable[Tenant], now: float) -> dict[str, int]: ...

    def take_levels(self, levels: Mapping[BucketKey, float], shares: int, now: float) -> None: ...

    def take_claims(
        self, tenants: Iterable[Tenant], others: Mapping[str, int], now: float
    ) -> None: ...

    def alone(self) -> None: ...


class PrefixExchange(Protocol):
    """What is told and heard of prefixes; `SharedPrefixes` is one."""

    def report(self) -> tuple[PrefixDelta, ...]: ...

    def told(self) -> int: ...

    def untold(self) -> None: ...

    def tell_again(self) -> None: ...

    def take(self, heard: Iterable[HeardPrefixes], known: Collection[str]) -> int: ...

    def reset(self) -> None: ...


class StateSync:
    """Owns the store; close it with `close`, after the last request. `run` until cancelled."""

    def __init__(
        self,
        settings: StateSettings,
        store: ClusterStore,
        view: ClusterView,
        quotas: Budgets | None,
        tenants: Callable[[], Iterable[Tenant]],
        policy: PolicyExchange | None,
        metrics: StateMetrics,
        clock: Clock,
        prefixes: PrefixExchange | None = None,
        processes: int = 1,
    ) -> None:
        """`quotas` None: nobody is told apart. `policy` and `prefixes` None: not shared.
        `processes`: workers that this one speaks for.
        """
        self._settings = settings
        self._store = store
        self._view = view
        self._quotas = quotas
        self._tenants = tenants
        self._policy = policy
        self._metrics = metrics
        self._clock = clock
        self._prefixes = prefixes
        self._prefixes_seq = 0
        self._processes = processes
        self.max_pause_s = MAX_PAUSE_S
        self.tells_links = True
        """False where all that are told have them from elsewhere."""
        self.id = uuid.uuid4().hex
        self.sent = SentTelling(
            settings.sent_interval_s, store, view, metrics, self.id, lambda: not self._failures
        )
        self.address = ""
        self._epoch = ""
        self._seq = 0
        self._policy_version = 0
        self._publish: str | None = None
        """Not known to have arrived."""
        self._own_text: str | None = None
        """To be told again to a store that has lost it."""
        self._everything = True
        self._heard_at: float | None = None
        self._failures = 0
        self._up = False
        self._most_until = 0.0
        """Until then nobody is taken to be gone: the store has just lost who was there."""
        self.shares = settings.expected_gateways
        if quotas is not None:
            quotas.take_levels({}, self.shares, clock.now())
        metrics.watch(self)

    def __repr__(self) -> str:
        state = "up" if self._up else "down"
        return f"<StateSync {state} shares={self.shares} failures={self._failures}>"

    @property
    def up(self) -> bool:
        return self._up

    @property
    def age_s(self) -> float:
        """Since the store was last heard; infinite: never."""
        return float("inf") if self._heard_at is None else self._clock.now() - self._heard_at

    async def run(self) -> None:
        """Exchange, and between two exchanges tell what was just sent, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._exchanges())
            group.create_task(self.sent.run())

    async def _exchanges(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            await self.exchange()
            if task.cancelling():  # which the client of Redis may have kept to itself
                return
            pause_s = self._settings.interval_s * 2 ** min(10, max(0, self._failures - 3))
            longest_s = max(self.max_pause_s, self._settings.interval_s)
            await asyncio.sleep(min(pause_s, longest_s))

    async def exchange(self) -> None:
        """Tell and hear once; what fails is told again with the next one."""
        started = self._clock.now()
        report = self._report(started)
        self._everything = False
        try:
            shared = await self._store.exchange(report)
        except StateUnavailable as exc:
            self._failed(exc, report, started)
            return
        except BaseException:
            self._untold(report)
            raise
        self._metrics.exchanged("ok", self._clock.now() - started)
        if report.publish is not None and report.publish == self._publish:
            self._publish = None
        await self._take(shared, report)

    async def close(self) -> None:
        """Tell the last of what was used, and leave; as long as one exchange may take."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._store.exchange(self._report(self._clock.now()))
                await self._store.leave(self.id)
        except (TimeoutError, StateUnavailable) as exc:
            logger.warning("the others are not told that this gateway is gone: %s", exc)
        await self._store.close()

    # --- telling ---

    def _report(self, now: float) -> Report:
        quotas = self._quotas
        spends: tuple[Spend, ...] = ()
        if quotas is not None:
            spends = tuple(quotas.report(now, everything=self._everything))
        if self._policy is not None:
            text = self._policy.published()
            if text is not None:
                self._publish = self._own_text = text
        sent = self.sent.now()
        member = Member(
            self.id,
            self.address,
            quotas.claims(self._tenants(), now) if quotas is not None else {},
            sent.loads,
            tuple(self._links(now)) if self.tells_links else (),
            self._processes,
            sent.seq,
        )
        return Report(
            member,
            self._settings.member_ttl_s,
            spends,
            self._epoch,
            self._seq,
            self._policy_version,
            self._publish,
            () if self._prefixes is None else self._prefixes.report(),
            None if self._prefixes is None else self._prefixes_seq,
        )

    def _links(self, now: float) -> Iterable[LinkSample]:
        """What our engines' agents have measured."""
        found = 0
        for engine in self._view.engines:
            feed = self._view.feeds.get(engine.name)
            for link in feed.links.values() if feed is not None else ():
                if link.goodput_bytes_per_s <= 0 or found >= MAX_LINKS:
                    continue
                found += 1
                assert feed is not None
                yield LinkSample(
                    engine.name,
                    link.peer,
                    link.instance,
                    link.goodput_bytes_per_s,
                    link.rtt_s,
                    link.wire_ratio,
                    link.age_s + feed.age_s(now),
                )

    # --- hearing ---

    async def _take(self, shared: Shared, report: Report) -> None:
        now = self._clock.now()
        if shared.epoch != self._epoch:
            if self._epoch:
                logger.warning("the shared state was lost; this gateway tells it what it knows")
                self._metrics.lost()
                self._everything = True
                self._publish = self._publish or self._own_text
                self._most_until = now + self._settings.member_ttl_s
            self._policy_version = 0
        self._take_prefixes(shared)
        self._epoch, self._seq = shared.epoch, shared.seq
        self._heard_at, self._failures = now, 0
        there = max(1, sum(member.processes for member in shared.members))
        self.shares = max(there, self.shares) if now < self._most_until else there
        self._view.neighbours.take(shared.members, self.id, now)
        if self._quotas is not None:
            others: dict[str, int] = {}
            for member in self._view.neighbours.members:
                for tenant, claim in member.claims.items():
                    others[tenant] = others.get(tenant, 0) + claim
            self._quotas.take_levels(shared.levels, self.shares, now)
            self._quotas.take_claims(self._tenants(), others, now)
            if shared.alone:
                self._quotas.alone()
        if not self._up:
            self._up = True
            logger.info("in touch with %d others", max(0, len(shared.members) - 1))
        if shared.policy is not None:
            self._policy_version = shared.policy.version
            self._own_text = shared.policy.text
            if self._policy is not None and shared.policy.text != report.publish:
                await self._policy.adopt(shared.policy.text)

    def _take_prefixes(self, shared: Shared) -> None:
        prefixes = self._prefixes
        if prefixes is None:
            return
        told = prefixes.told()
        lost = bool(self._epoch) and shared.epoch != self._epoch
        if lost or shared.prefixes_gap:
            prefixes.reset()
        if lost:
            prefixes.tell_again()
        known = {engine.name for engine in self._view.engines}
        heard = prefixes.take(shared.prefixes, known)
        self._prefixes_seq = shared.prefixes_seq
        self._metrics.prefixes(told, heard, lost or shared.prefixes_gap)

    def _failed(self, exc: StateUnavailable, report: Report, started: float) -> None:
        now = self._clock.now()
        self._metrics.exchanged("failed", now - started)
        self._untold(report)
        self._failures += 1
        long_ago = self.age_s > max(DOWN_AFTER_S, 3 * self._settings.interval_s)
        if self._failures >= 3 and long_ago and (self._up or self._failures == 3):
            self._up = False
            logger.warning(
                "the shared state is away (%s): this gateway goes on with what it knows, and with "
                "1 of %d shares of each budget",
                exc.message,
                self.shares,
            )
        if self._failures >= 3 and long_ago:
            if self._quotas is not None:
                self._quotas.alone()
            if self.age_s > self._settings.member_ttl_s:
                self._view.neighbours.forget()

    def _untold(self, report: Report) -> None:
        if self._quotas is not None:
            self._quotas.unreport(report.spends)
        if self._prefixes is not None:
            self._prefixes.untold()
