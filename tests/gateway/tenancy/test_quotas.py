"""Token buckets and counts: what is let through, what is refused, and when to come back."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.tenancy.quotas import DAILY, REQUESTS, TOKENS, Quotas
from prfaas.errors import RateLimited
from prfaas.tenants import Tenant

NOW = 100.0


def quotas_of(*tenants: Tenant) -> Quotas:
    quotas = Quotas()
    quotas.take_tenants(tenants, NOW)
    return quotas


def tenant(**bounds: Any) -> Tenant:
    return Tenant(name="a", **bounds)


def refusal(quotas: Quotas, who: Tenant, tokens: int, now: float) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        quotas.take_tokens(who, tokens, now)
    return caught.value


def test_a_tenant_without_bounds_is_never_refused() -> None:
    who = tenant()
    quotas = quotas_of(who)
    for _ in range(1000):
        quotas.enter(who, NOW)
        quotas.take_tokens(who, 10**9, NOW)
    assert quotas.in_flight("a") == 1000


def test_requests_are_let_in_at_their_rate() -> None:
    who = tenant(requests_per_minute=60)
    quotas = quotas_of(who)
    for _ in range(60):
        quotas.enter(who, NOW)
    with pytest.raises(RateLimited, match=r"tenant a: its requests_per_minute \(60\)") as caught:
        quotas.enter(who, NOW)
    assert caught.value.param == REQUESTS
    assert caught.value.retry_after_s == pytest.approx(1.0)
    assert quotas.in_flight("a") == 60, "one that is refused is not counted as in flight"
    quotas.enter(who, NOW + 1.001)


def test_who_comes_back_when_told_is_let_in() -> None:
    who = tenant(tokens_per_minute=600)
    quotas = quotas_of(who)
    quotas.take_tokens(who, 600, NOW)
    error = refusal(quotas, who, 100, NOW)
    assert error.retry_after_s is not None
    refusal(quotas, who, 100, NOW + error.retry_after_s - 0.01)
    quotas.take_tokens(who, 100, NOW + error.retry_after_s)


def test_what_costs_more_than_a_whole_budget_waits_for_all_of_it_and_is_paid_off() -> None:
    who = tenant(tokens_per_minute=600)
    quotas = quotas_of(who)
    quotas.take_tokens(who, 1200, NOW)
    assert quotas.level("a", TOKENS, NOW) == -600
    refusal(quotas, who, 1, NOW + 60)
    quotas.take_tokens(who, 1, NOW + 61)


def test_one_budget_that_is_used_up_takes_nothing_from_the_other() -> None:
    who = tenant(tokens_per_minute=1000, tokens_per_day=100)
    quotas = quotas_of(who)
    quotas.take_tokens(who, 100, NOW)
    assert refusal(quotas, who, 50, NOW).param == DAILY
    assert quotas.level("a", TOKENS, NOW) == 900


def test_what_was_really_used_is_charged() -> None:
    who = tenant(tokens_per_minute=1000)
    quotas = quotas_of(who)
    quotas.take_tokens(who, 500, NOW)
    quotas.settle_tokens(who, -400, NOW)
    assert quotas.level("a", TOKENS, NOW) == 900
    quotas.settle_tokens(who, 950, NOW)
    assert quotas.level("a", TOKENS, NOW) == -50
    refusal(quotas, who, 1, NOW)


def test_requests_in_flight_are_bounded() -> None:
    who = tenant(concurrent_requests=2)
    quotas = quotas_of(who)
    quotas.enter(who, NOW)
    quotas.enter(who, NOW)
    with pytest.raises(RateLimited, match="2 requests are in flight") as caught:
        quotas.enter(who, NOW)
    assert caught.value.param == "concurrent_requests"
    quotas.leave(who)
    quotas.enter(who, NOW)


def test_a_change_of_the_file_forgives_nothing() -> None:
    quotas = quotas_of(tenant(tokens_per_minute=1000))
    quotas.take_tokens(tenant(), 1000, NOW)
    quotas.enter(tenant(), NOW)
    smaller = tenant(tokens_per_minute=600, concurrent_requests=1)
    quotas.take_tenants([smaller], NOW)
    refusal(quotas, smaller, 10, NOW)
    quotas.take_tokens(smaller, 10, NOW + 1)
    with pytest.raises(RateLimited):
        quotas.enter(smaller, NOW)


def test_a_bucket_never_holds_more_than_its_capacity() -> None:
    quotas = quotas_of(tenant(tokens_per_minute=600))
    assert quotas.level("a", TOKENS, NOW + 10_000) == 600
    quotas.take_tenants([tenant(tokens_per_minute=60)], NOW + 10_000)
    assert quotas.level("a", TOKENS, NOW + 10_000) == 60
    assert quotas.level("b", TOKENS, NOW) is None


def test_over_a_long_time_no_more_than_the_budget_is_let_through() -> None:
    who = tenant(tokens_per_minute=6000)
    quotas = quotas_of(who)
    let_through, now = 0, NOW
    for step in range(20_000):
        now = NOW + step * 0.05
        cost = 1 + step * 7919 % 400
        try:
            quotas.take_tokens(who, cost, now)
        except RateLimited:
            continue
        let_through += cost
    assert let_through <= 6000 + (now - NOW) * 100
    assert let_through > 0.95 * (now - NOW) * 100
