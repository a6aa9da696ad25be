"""A store in memory, for gateways of one process."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from itertools import islice

import msgspec

from gateway.state.listeners import Listeners
from prfaas.clock import Clock
from prfaas.cluster_state import (
    PREFIX_BATCHES,
    PREFIX_READ,
    PREFIX_TTL_S,
    BucketKey,
    HeardPrefixes,
    Member,
    PrefixDelta,
    Report,
    Sent,
    Shared,
    SharedPolicy,
    Spend,
)


class StoredBucket:
    """One budget as the store has it."""

    __slots__ = ("at", "capacity", "level", "period_s", "seq")

    def __init__(self, spend: Spend, now: float) -> None:
        self.capacity = spend.capacity
        self.period_s = spend.period_s
        self.level = min(spend.capacity, spend.level)
        self.at = now
        self.seq = 0

    def refill(self, now: float, share: float = 1.0) -> None:
        """At so much of its rate, and up to so much of it."""
        gained = max(0.0, now - self.at) * self.capacity / self.period_s * share
        self.level = min(self.capacity * share, self.level + gained)
        self.at = now


class MemoryStore:
    """Owns what gateways told; nothing to close."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refilled_share = 1.0
        self._listeners = Listeners()
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a store that was restarted."""
        self._epoch = uuid.uuid4().hex
        self._seq = 0
        self._members: dict[str, tuple[float, Member]] = {}
        self._buckets: dict[BucketKey, StoredBucket] = {}
        self._policy = SharedPolicy(0, "")
        self._prefixes: deque[tuple[float, str, tuple[PrefixDelta, ...]]] = deque(
            maxlen=PREFIX_BATCHES
        )
        self._prefixes_seq = 0

    async def exchange(self, report: Report) -> Shared:
        now = self._clock.now()
        self._members[report.member.id] = (now + report.ttl_s, report.member)
        self._members = {k: v for k, v in self._members.items() if v[0] > now}
        for spend in report.spends:
            bucket = self._buckets.get(spend.key)
            if bucket is None:
                bucket = self._buckets[spend.key] = self._new_bucket(spend, now)
            bucket.refill(now, self._refilled_share)
            bucket.capacity, bucket.period_s = spend.capacity, spend.period_s
            bucket.level = min(bucket.level, spend.capacity) - spend.spent
            self._seq += 1
            bucket.seq = self._seq
        if report.publish is not None and report.publish != self._policy.text:
            self._policy = SharedPolicy(self._policy.version + 1, report.publish)
        since = report.since if report.epoch == self._epoch else 0
        levels = {}
        for key, bucket in self._buckets.items():
            if bucket.seq > since:
                bucket.refill(now, self._refilled_share)
                levels[key] = bucket.level
        known = report.policy_version if report.epoch == self._epoch else 0
        if report.prefixes:
            self._prefixes_seq += 1
            self._prefixes.append((now, report.member.id, report.prefixes))
        prefixes, upto, gap = self._prefixes_for(report, now)
        return Shared(
            self._epoch,
            self._seq,
            tuple(member for _, member in self._members.values()),
            levels,
            self._policy if self._policy.version > known else None,
            prefixes,
            upto,
            gap,
        )

    def _new_bucket(self, spend: Spend, now: float) -> StoredBucket:
        return StoredBucket(spend, now)

    def _prefixes_for(
        self, report: Report, now: float
    ) -> tuple[tuple[HeardPrefixes, ...], int, bool]:
        """The next of what others told, how far it goes, and whether some is missing before."""
        newest = self._prefixes_seq
        if report.prefixes_since is None:
            return (), newest, False
        same = report.epoch == self._epoch
        first = newest - len(self._prefixes)
        since = max(report.prefixes_since if same else 0, first)
        read = list(islice(self._prefixes, since - first, since - first + PREFIX_READ))
        heard = tuple(
            HeardPrefixes(sender, now - at, deltas)
            for at, sender, deltas in read
            if sender != report.member.id and now - at < PREFIX_TTL_S
        )
        return heard, since + len(read), same and report.prefixes_since < first

    async def tell_sent(self, sent: Sent) -> None:
        known = self._members.get(sent.member)
        if known is not None and known[1].sent_seq < sent.seq:
            member = msgspec.structs.replace(known[1], sent=sent.loads, sent_seq=sent.seq)
            self._members[sent.member] = known[0], member
        self.pass_on(sent)

    def pass_on(self, sent: Sent) -> None:
        """To all who hear."""
        self._listeners.pass_on(sent)

    async def hear_sent(self, take: Callable[[Sent], None]) -> None:
        await self._listeners.hear(take)

    async def leave(self, member_id: str) -> None:
        self._members.pop(member_id, None)

    async def close(self) -> None:
        pass
