"""The door and the fallback budget."""

import asyncio

import pytest

from gateway.admission import Admission, FallbackBudget
from prfaas.errors import Overloaded


def test_one_too_many_is_refused_and_told_when_to_come_back() -> None:
    admission = Admission(2)
    admission.enter()
    admission.enter()
    with pytest.raises(Overloaded, match="2 requests are in flight") as caught:
        admission.enter()
    assert caught.value.retry_after_s == 1.0
    admission.leave()
    admission.enter()
    assert (admission.in_flight, admission.peak) == (2, 2)


def test_a_draining_gateway_lets_nobody_in() -> None:
    admission = Admission(2)
    admission.draining = True
    with pytest.raises(Overloaded, match="shutting down"):
        admission.enter()


async def test_waiting_ends_when_the_last_one_leaves() -> None:
    admission = Admission(3)
    await admission.wait_empty()
    admission.enter()
    admission.enter()
    waiter = asyncio.create_task(admission.wait_empty())
    admission.leave()
    await asyncio.sleep(0)
    assert not waiter.done()
    admission.leave()
    await waiter


def test_fallback_is_granted_while_the_budget_lasts() -> None:
    budget = FallbackBudget(1000)
    assert budget.grant("a", 600)
    assert not budget.grant("b", 401)
    assert budget.grant("c", 400)
    assert budget.free_tokens == 0
    budget.finish("a")
    assert budget.free_tokens == 600
    assert budget.grant("b", 401)


def test_a_grant_is_given_once_and_taken_back_once() -> None:
    budget = FallbackBudget(1000)
    assert budget.grant("a", 100)
    assert not budget.grant("a", 100)
    budget.finish("a")
    budget.finish("a")
    budget.finish("never granted")
    assert budget.granted_tokens == 0


def test_no_budget_grants_nothing() -> None:
    assert not FallbackBudget(0).grant("a", 1)
