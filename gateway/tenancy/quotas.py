"""Token buckets and counts of what is in flight: what each tenant may still ask of this gateway.

All of it is decided here, at once. Where several gateways share a budget, each lives on its share
of it between two exchanges with the others (`gateway.state`), which tell the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prfaas.cluster_state import BucketKey, Spend
from prfaas.errors import RateLimited
from prfaas.tenants import Tenant

MINUTE_S = 60.0
DAY_S = 86400.0
BUSY_RETRY_S = 1.0
LATELY_S = 2.0
"""A tenant that has asked within this keeps a claim on requests in flight."""
REQUESTS, TOKENS, DAILY, CONCURRENT = (
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "concurrent_requests",
)


class Bucket:
    """So much for a while, refilled all the time; `capacity` may be spent at once."""

    __slots__ = ("at", "capacity", "level", "period_s", "spent")

    def __init__(self, capacity: float, period_s: float, now: float, shares: int) -> None:
        self.capacity = capacity
        self.period_s = period_s
        self.level = capacity / shares
        """Of this gateway's share; below zero after more was used than had been expected."""
        self.at = now
        self.spent = 0.0
        """Since this was last told to the others."""

    @property
    def rate_per_s(self) -> float:
        return self.capacity / self.period_s

    def refill(self, now: float, shares: int) -> None:
        most = self.capacity / shares
        gained = max(0.0, now - self.at) * self.rate_per_s / shares
        self.level = min(most, self.level + gained)
        self.at = now

    def wait_s(self, cost: float, shares: int) -> float:
        """Until it has `cost`; 0: now. What costs more than it ever has needs it to be full."""
        need = min(cost, self.capacity / shares)
        if self.level >= need - 1e-9:
            return 0.0
        return (need - self.level) * shares / self.rate_per_s

    def spend(self, cost: float) -> None:
        self.level -= cost
        self.spent += cost


@dataclass(slots=True)
class InFlight:
    """Of one tenant. `claim` is what the others were told it may have here, `others` what they have
    claimed, `cap` what follows from both; None: nobody has been heard.
    """

    own: int = 0
    others: int = 0
    claim: int = 0
    cap: int | None = None
    wanted_at: float = -math.inf
    claims: bool = False
    """The others have heard of claims here before."""


class Quotas:
    """Owns the buckets and counts of all tenants; synchronous, nothing to close."""

    def __init__(self) -> None:
        self.shares = 1
        """Gateways that live on each budget."""
        self._buckets: dict[BucketKey, Bucket] = {}
        self._limits: dict[str, tuple[tuple[str, Bucket], ...]] = {}
        self._in_flight: dict[str, InFlight] = {}

    def take_tenants(self, tenants: Iterable[Tenant], now: float) -> None:
        """Buckets for these tenants; what they have used stays used."""
        buckets: dict[BucketKey, Bucket] = {}
        self._limits = {}
        for tenant in tenants:
            found: list[tuple[str, Bucket]] = []
            for limit, capacity, period_s in (
                (REQUESTS, tenant.requests_per_minute, MINUTE_S),
                (TOKENS, tenant.tokens_per_minute, MINUTE_S),
                (DAILY, tenant.tokens_per_day, DAY_S),
            ):
                if capacity is None:
                    continue
                key = (tenant.name, limit)
                bucket = self._buckets.get(key) or Bucket(capacity, period_s, now, self.shares)
                bucket.refill(now, self.shares)
                bucket.capacity = capacity
                bucket.refill(now, self.shares)
                buckets[key] = bucket
                found.append((limit, bucket))
            self._limits[tenant.name] = tuple(found)
            self._in_flight.setdefault(tenant.name, InFlight())
        self._buckets = buckets

    def enter(self, tenant: Tenant, now: float) -> None:
        """One more request of this tenant, until `leave`. Raises RateLimited."""
        count = self._in_flight[tenant.name]
        most = tenant.concurrent_requests
        if most is not None:
            count.wanted_at = now
            cap = count.cap if count.cap is not None else -(-most // self.shares)
            if count.own >= min(cap, most):
                raise RateLimited(
                    f"tenant {tenant.name}: {most} requests are in flight, which is its limit",
                    param=CONCURRENT,
                    retry_after_s=BUSY_RETRY_S,
                )
        self._spend(tenant, {REQUESTS: 1.0}, now)
        count.own += 1

    def leave(self, tenant: Tenant) -> None:
        self._in_flight[tenant.name].own -= 1

    def take_tokens(self, tenant: Tenant, tokens: int, now: float) -> None:
        """Before they are used. Raises RateLimited."""
        self._spend(tenant, {TOKENS: tokens, DAILY: tokens}, now)

    def settle_tokens(self, tenant: Tenant, more: int, now: float) -> None:
        """It used so many more than were taken for it (less: below zero), which is not refused."""
        for limit, bucket in self._limits.get(tenant.name, ()):
            if limit in (TOKENS, DAILY):
                bucket.refill(now, self.shares)
                bucket.spend(more)

    def in_flight(self, tenant: str) -> int:
        """Of this gateway."""
        found = self._in_flight.get(tenant)
        return found.own if found is not None else 0

    def level(self, tenant: str, limit: str, now: float) -> float | None:
        """What this gateway may still let through; None without such a limit."""
        bucket = self._buckets.get((tenant, limit))
        if bucket is None:
            return None
        bucket.refill(now, self.shares)
        return bucket.level

    def _spend(self, tenant: Tenant, costs: Mapping[str, float], now: float) -> None:
        """All of it or nothing."""
        paid: list[tuple[Bucket, float]] = []
        for limit, bucket in self._limits.get(tenant.name, ()):
            cost = costs.get(limit)
            if cost is None:
                continue
            bucket.refill(now, self.shares)
            wait_s = bucket.wait_s(cost, self.shares)
            if wait_s > 0:
                raise RateLimited(
                    f"tenant {tenant.name}: its {limit} ({bucket.capacity:g}) are used up; try "
                    f"again in {max(1, math.ceil(wait_s))} s",
                    param=limit,
                    retry_after_s=wait_s,
                )
            paid.append((bucket, cost))
        for bucket, cost in paid:
            bucket.spend(cost)

    # --- what other gateways are told, and what they tell ---

    def claims(self, tenants: Iterable[Tenant], now: float) -> dict[str, int]:
        """How many requests each tenant may have here until this is said again, where any: those in
        flight, and where it has asked lately a share of what nobody claims.
        """
        claims = {}
        for tenant in tenants:
            most, count = tenant.concurrent_requests, self._in_flight.get(tenant.name)
            if most is None or count is None:
                continue
            free = max(0, most - count.own - count.others)
            lately = now - count.wanted_at < LATELY_S
            count.claim = count.own + (-(-free // self.shares) if lately else 0)
            if count.cap is not None and lately:
                count.cap = min(count.cap, count.claim)
            if count.claim:
                claims[tenant.name] = count.claim
        return claims

    def report(self, now: float, *, everything: bool) -> list[Spend]:
        """What was used since the last report, which this is; on `everything` of all buckets."""
        spends = []
        for key, bucket in self._buckets.items():
            if bucket.spent == 0 and not everything:
                continue
            bucket.refill(now, self.shares)
            level = bucket.level * self.shares + bucket.spent
            spends.append(Spend(key, bucket.capacity, bucket.period_s, bucket.spent, level))
            bucket.spent = 0.0
        return spends

    def unreport(self, spends: Iterable[Spend]) -> None:
        """The report did not arrive."""
        for spend in spends:
            bucket = self._buckets.get(spend.key)
            if bucket is not None:
                bucket.spent += spend.spent

    def take_levels(
        self,
        levels: Mapping[BucketKey, float],
        shares: int,
        now: float,
    ) -> None:
        """What all gateways together have left."""
        for bucket in self._buckets.values():
            bucket.refill(now, self.shares)
            if shares != self.shares:
                bucket.level *= self.shares / shares
        self.shares = shares
        for key, level in levels.items():
            known = self._buckets.get(key)
            if known is not None:
                # What has been used here since the report is not in it yet.
                known.level = min(known.capacity, level) / shares - known.spent
                known.at = now

    def take_claims(self, tenants: Iterable[Tenant], others: Mapping[str, int], now: float) -> None:
        """What the others claimed when they heard our own claims: never more than is left of ours.

        A tenant that has not asked lately claims nothing, and may begin with its share of what is
        left; it gets no more than that until the others have heard of it.
        """
        for tenant in tenants:
            most, count = tenant.concurrent_requests, self._in_flight.get(tenant.name)
            if most is None or count is None:
                continue
            count.others = others.get(tenant.name, 0)
            left = max(0, most - count.own - count.others)
            lately = now - count.wanted_at < LATELY_S
            if not lately:
                count.cap = count.own + -(-left // self.shares)
            elif count.claims:
                count.cap = max(count.own, min(count.claim, count.own + left))
            elif count.cap is not None:
                count.cap = max(count.own, min(count.cap, count.own + left))
            else:
                count.cap = max(count.own, min(-(-most // self.shares), count.own + left))
            count.claims = lately

    def alone(self) -> None:
        """Nobody is heard: each gateway keeps to its share, so that all together keep to all."""
        for count in self._in_flight.values():
            count.cap = None
