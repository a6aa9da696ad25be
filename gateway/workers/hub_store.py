"""Where the workers of one host meet, and what all of them together tell a store beyond it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from gateway.neighbours import Neighbours
from gateway.sent import SentLedger, Unshown
from gateway.state.memory import MemoryStore, StoredBucket
from prfaas.clock import Clock
from prfaas.cluster_state import (
    PREFIX_BATCHES,
    PREFIX_NAME_BYTES,
    BucketKey,
    HeardPrefixes,
    Member,
    PrefixDelta,
    Report,
    Sent,
    Shared,
    Spend,
)
from prfaas.tenants import Tenant

MAX_DELTAS = 4096
"""Of prefixes, not told to the store yet; the oldest go first."""


class HubStore(MemoryStore):
    """The store of a host's workers. With a store beyond, `gateway.state.sync` keeps in touch with
    that one, and sees all workers as one member, by what is said here; then levels are those of
    all hosts, as last heard.
    """

    def __init__(self, clock: Clock, workers: int, neighbours: Neighbours, *, beyond: bool) -> None:
        """`beyond`: there is another store; `neighbours`: who is heard through it."""
        self._workers = workers
        self._neighbours = neighbours
        self._untold: dict[BucketKey, float] = {}
        self._heard: dict[BucketKey, tuple[float, float]] = {}
        """Level and time of buckets that no worker has named yet."""
        self.pending: deque[PrefixDelta] = deque(maxlen=MAX_DELTAS)
        """Prefixes that workers told and the store beyond has not heard."""
        self._beyond = beyond
        self.sent_changed: Callable[[], None] | None = None
        """Called when a worker has told what it just sent."""
        self._shares = workers
        """Of all hosts."""
        self._alone = False
        super().__init__(clock)

    async def exchange(self, report: Report) -> Shared:
        for spend in report.spends if self._beyond else ():
            self._untold[spend.key] = self._untold.get(spend.key, 0.0) + spend.spent
        if self._beyond:
            self.pending += report.prefixes
        shared = await super().exchange(report)
        others = list(self._neighbours.members)
        unseen = 0
        if self._beyond:
            unseen = self._shares - self._workers - sum(other.processes for other in others)
        if unseen > 0:  # not heard now, but their share is theirs
            others.append(Member("unseen", processes=unseen))
        return Shared(
            shared.epoch,
            shared.seq,
            (*shared.members, *others),
            shared.levels,
            shared.policy,
            shared.prefixes,
            shared.prefixes_seq,
            shared.prefixes_gap,
            self._alone,
        )

    async def tell_sent(self, sent: Sent) -> None:
        await super().tell_sent(sent)
        if self.sent_changed is not None:
            self.sent_changed()

    def _new_bucket(self, spend: Spend, now: float) -> StoredBucket:
        bucket = super()._new_bucket(spend, now)
        heard = self._heard.pop(spend.key, None)
        if heard is not None:
            bucket.level, bucket.at = heard
        return bucket

    def local(self) -> list[Member]:
        """The workers that are there."""
        now = self._clock.now()
        return [member for until, member in self._members.values() if until > now]

    # --- prefixes, for HubPrefixes ---

    def tell_prefixes_again(self) -> None:
        """All that workers said and that is still known."""
        self.pending.clear()
        for _, sender, deltas in self._prefixes:
            if sender in self._members:
                self.pending += deltas

    def lose_prefixes(self) -> None:
        """What was heard may be wrong: workers see that some is missing."""
        self._prefixes.clear()
        self._prefixes_seq += PREFIX_BATCHES

    def take_prefixes(self, batches: Iterable[HeardPrefixes]) -> int:
        """What other hosts told; how many names."""
        names_bytes = 0
        now = self._clock.now()
        for batch in batches:
            self._prefixes_seq += 1
            self._prefixes.append((now - batch.age_s, batch.sender, batch.deltas))
            names_bytes += sum(len(delta.names) for delta in batch.deltas)
        return names_bytes // PREFIX_NAME_BYTES

    # --- what is told beyond: as `Quotas` does for one gateway ---

    def claims(self, tenants: Iterable[Tenant], now: float) -> dict[str, int]:
        """Of all workers."""
        claims: dict[str, int] = {}
        for member in self.local():
            for tenant, claim in member.claims.items():
                claims[tenant] = claims.get(tenant, 0) + claim
        return claims

    def report(self, now: float, *, everything: bool) -> list[Spend]:
        """What workers have used since the last report, which this is."""
        spends = []
        for key, bucket in self._buckets.items():
            spent = self._untold.get(key, 0.0)
            if spent or everything:
                bucket.refill(now, self._refilled_share)
                level = bucket.level + spent
                spends.append(Spend(key, bucket.capacity, bucket.period_s, spent, level))
        self._untold.clear()
        return spends

    def unreport(self, spends: Iterable[Spend]) -> None:
        """The report did not arrive."""
        for spend in spends:
            self._untold[spend.key] = self._untold.get(spend.key, 0.0) + spend.spent

    def take_levels(self, levels: Mapping[BucketKey, float], shares: int, now: float) -> None:
        """What all hosts together have left."""
        self._shares = max(self._workers, shares)
        self._alone = False
        self._refilled_share = 1.0
        for key, level in levels.items():
            bucket = self._buckets.get(key)
            if bucket is None:
                self._heard[key] = (level, now)
                continue
            bucket.level = min(bucket.capacity, level) - self._untold.get(key, 0.0)
            bucket.at = now
            self._seq += 1
            bucket.seq = self._seq

    def take_claims(self, tenants: Iterable[Tenant], others: Mapping[str, int], now: float) -> None:
        """Workers hear of other hosts' claims by their members."""

    def alone(self) -> None:
        """Nobody is heard: budgets come back at the share of this host only."""
        if not self._alone:
            now = self._clock.now()
            for bucket in self._buckets.values():
                bucket.refill(now, self._refilled_share)
        self._alone = True
        self._refilled_share = self._workers / self._shares


class HubPrefixes:
    """What is told beyond of prefixes, and heard: as `SharedPrefixes` does for one gateway."""

    def __init__(self, store: HubStore) -> None:
        self._store = store
        self._under_way = 0

    def report(self) -> tuple[PrefixDelta, ...]:
        pending = self._store.pending
        self._under_way = len(pending)
        return tuple(pending)

    def told(self) -> int:
        """The report arrived; how many names were in it."""
        count, self._under_way = self._under_way, 0
        pending = self._store.pending
        names_bytes = sum(len(pending.popleft().names) for _ in range(min(count, len(pending))))
        return names_bytes // PREFIX_NAME_BYTES

    def untold(self) -> None:
        self._under_way = 0

    def tell_again(self) -> None:
        self._store.tell_prefixes_again()

    def take(self, heard: Iterable[HeardPrefixes], known: Collection[str]) -> int:
        """Workers look themselves which engines they know; how many names."""
        return self._store.take_prefixes(heard)

    def reset(self) -> None:
        self._store.lose_prefixes()


class WorkersSent(SentLedger):
    """What the workers of a host have sent, by what each last told."""

    def __init__(self, store: HubStore) -> None:
        super().__init__(settle_s=0.0)
        self._store = store
        store.sent_changed = self._changed

    def sums(self) -> Mapping[str, Unshown]:
        found: dict[str, Unshown] = {}
        for member in self._store.local():
            for place, load in member.sent.items():
                known = found.setdefault(place, Unshown())
                known.tokens += load.tokens
                known.requests += load.requests
                known.raw_bytes += load.raw_bytes
                known.wire_bytes += load.wire_bytes
                known.transfers += load.transfers
                known.staged_bytes += load.staged_bytes
        return found
