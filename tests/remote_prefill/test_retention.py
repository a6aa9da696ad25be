"""Retention is reserved whole, first come first served, and all of it comes back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InvalidRequest, Overloaded
from remote_prefill.retention import RetentionPool, Ticket


@given(st.integers(0, 10_000))
async def test_never_over_capacity_and_served_in_order(seed: int) -> None:
    rng = random.Random(seed)
    pool = RetentionPool(100, 50)
    tickets: list[Ticket] = []
    granted: list[Ticket] = []
    for _ in range(60):
        if tickets and rng.random() < 0.5:
            tickets.pop(rng.randrange(len(tickets))).release()
        elif pool.waiting < 50:
            tickets.append(pool.request(rng.randint(1, 60), retry_after_s=1))
        granted = [t for t in tickets if t.granted.is_set()]
        assert pool.used_bytes == sum(t.nbytes for t in granted) <= 100
        positions = [t.position for t in tickets]
        assert positions == sorted(positions)  # nobody overtakes
        assert positions.count(0) == len(granted)
        assert [p for p in positions if p] == list(range(1, pool.waiting + 1))
    for ticket in tickets:
        ticket.release()
        ticket.release()
    assert (pool.used_bytes, pool.waiting, pool.free_bytes) == (0, 0, 100)


async def test_what_never_fits_is_invalid_and_a_full_queue_overloaded() -> None:
    pool = RetentionPool(10, 1)
    with pytest.raises(InvalidRequest, match="can never fit") as caught:
        pool.request(11, retry_after_s=1)
    assert caught.value.param == "tokens"
    pool.request(6, retry_after_s=1)
    assert pool.free_bytes == 4
    pool.request(6, retry_after_s=1)
    assert pool.free_bytes == 0  # others wait
    with pytest.raises(Overloaded) as full:
        pool.request(1, retry_after_s=2.5)
    assert full.value.retry_after_s == 2.5
