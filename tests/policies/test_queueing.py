"""Queueing formulas against textbook values and against brute force."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from policies.queueing import (
    FOREVER,
    NO_WAIT,
    Wait,
    erlang_c,
    late_share,
    mgc_wait,
    shared_link_stretch,
)


def test_erlang_c_of_one_server_is_its_utilisation() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)


@pytest.mark.parametrize(("servers", "offered", "waits"), [(2, 1.0, 1 / 3), (10, 8.0, 0.4092)])
def test_erlang_c_has_its_textbook_values(servers: int, offered: float, waits: float) -> None:
    assert erlang_c(servers, offered) == pytest.approx(waits, abs=1e-4)


def test_the_wait_of_mg1_is_pollaczek_and_khinchin() -> None:
    # deterministic service of 1 s at 0.8: rho / (2 (1 - rho)) = 2 s
    wait = mgc_wait(0.8, 1, 1.0, 1.0)
    assert wait.overall_mean_s == pytest.approx(2.0)
    exponential = mgc_wait(0.8, 1, 1.0, 2.0)
    assert exponential.overall_mean_s == pytest.approx(4.0)


def test_what_cannot_keep_up_waits_for_ever_and_nothing_waits_for_nothing() -> None:
    assert mgc_wait(1.0, 1, 1.0, 1.0) is FOREVER
    assert mgc_wait(1.0, 0, 1.0, 1.0) is FOREVER
    assert mgc_wait(0.0, 1, 1.0, 1.0) is NO_WAIT
    assert shared_link_stretch(1.0) == math.inf
    assert shared_link_stretch(0.5) == 2.0


@pytest.mark.parametrize(
    ("first", "second"),
    [(Wait(0.5, 2.0), Wait(0.3, 1.0)), (Wait(0.9, 2.0), Wait(0.9, 2.0)), (NO_WAIT, Wait(0.5, 3.0))],
)
def test_the_tail_of_two_waits_is_that_of_their_sum(first: Wait, second: Wait) -> None:
    rng = random.Random(1)

    def draw(wait: Wait) -> float:
        return rng.expovariate(1 / wait.mean_s) if rng.random() < wait.probability else 0.0

    sums = [draw(first) + draw(second) for _ in range(100_000)]
    for limit in (0.0, 0.5, 3.0, 8.0):
        share = sum(s > limit for s in sums) / len(sums)
        ours = late_share(np.array([limit]), np.array([1.0]), first, second)
        assert ours == pytest.approx(share, abs=0.006)


def test_no_slack_is_late_and_an_unstable_queue_makes_all_late() -> None:
    weight = np.array([0.25, 0.75])
    assert late_share(np.array([-1.0, 5.0]), weight, NO_WAIT, NO_WAIT) == 0.25
    assert late_share(np.array([9.0, 9.0]), weight, FOREVER, NO_WAIT) == 1.0
