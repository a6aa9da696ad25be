"""One pure judgement tells a slow sender, a slow receiver and a slow link apart."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.telemetry import LinkLimit
from remote_prefill.link_limit import (
    BUSY_SHARE,
    PATH_SHARE,
    PRESSED_SHARE,
    STALL_S,
    LinkEvidence,
    LinkHistory,
    Look,
    StallClock,
    judge,
)

PRESSED: dict[str, Any] = {"open_share": 1.0, "pressed_share": 1.0}


@pytest.mark.parametrize(
    ("evidence", "limit"),
    [
        (LinkEvidence(0.0), LinkLimit.IDLE),
        (LinkEvidence(0.0, 1.0, 1.0, 1.0, 0.0), LinkLimit.IDLE),
        # P has nothing to send for some of the time, whatever else is slow.
        (LinkEvidence(1.0, 0.0), LinkLimit.SENDER),
        (LinkEvidence(0.1, PRESSED_SHARE - 0.01, 0.0, 1.0, 0.0), LinkLimit.SENDER),
        # It has, and cannot get it out because its own thread is full.
        (LinkEvidence(**PRESSED, sender_busy_share=BUSY_SHARE), LinkLimit.SENDER),
        (
            LinkEvidence(**PRESSED, sender_busy_share=1.0, receiver_busy_share=1.0),
            LinkLimit.SENDER,
        ),
        # The receiver says that it is the slow one, or that it is not.
        (LinkEvidence(**PRESSED, receiver_busy_share=BUSY_SHARE), LinkLimit.RECEIVER),
        (LinkEvidence(**PRESSED, receiver_busy_share=BUSY_SHARE - 0.01), LinkLimit.LINK),
        (
            LinkEvidence(**PRESSED, receiver_busy_share=0.1, path_busy_share=0.0),
            LinkLimit.LINK,  # a relay has taken the bytes
        ),
        # It says nothing: the kernel knows whether its host has taken everything.
        (LinkEvidence(**PRESSED, path_busy_share=PATH_SHARE - 0.01), LinkLimit.RECEIVER),
        (LinkEvidence(**PRESSED, path_busy_share=PATH_SHARE), LinkLimit.LINK),
        (LinkEvidence(**PRESSED), LinkLimit.LINK),
        (LinkEvidence(1.0, PRESSED_SHARE, 0.5, 0.5, 0.9), LinkLimit.LINK),
    ],
)
def test_each_kind_of_slowness_has_its_name(evidence: LinkEvidence, limit: LinkLimit) -> None:
    assert judge(evidence) is limit


def test_the_limits_are_a_closed_set() -> None:
    assert {limit.value for limit in LinkLimit} == {"idle", "sender", "receiver", "link"}


def looks(history: LinkHistory, start_s: float, count: int, **fields: Any) -> float:
    """`count` looks every 50 ms; when the last one was."""
    for _ in range(count):
        start_s += 0.05
        history.add(start_s, Look(**{"span_s": 0.05, "open": True, **fields}))
    return start_s


def test_shares_are_of_the_last_second_and_of_the_time_in_question() -> None:
    history = LinkHistory()
    at = looks(history, 0.0, 100, pressed=True, path_busy=0.0, moved_bytes=9999)
    at = looks(history, at, 10, open=False)
    at = looks(history, at, 6, pressed=True, path_busy=0.5, moved_bytes=1000)
    at = looks(history, at, 2, pressed=True, backlog=True)  # the kernel was not asked
    looks(history, at, 2, pressed=False, path_busy=1.0)
    evidence = history.evidence(sender_busy_share=0.2, receiver_busy_share=0.3)
    assert evidence.open_share == pytest.approx(0.5)
    assert evidence.pressed_share == pytest.approx(0.8)
    assert evidence.path_busy_share == pytest.approx(0.5)
    assert (evidence.sender_busy_share, evidence.receiver_busy_share) == (0.2, 0.3)
    assert history.backlog_share == pytest.approx(0.2)
    assert history.rate_bytes_per_s == pytest.approx(6000, rel=1e-6)


def test_a_late_look_counts_for_the_time_it_stands_for() -> None:
    history = LinkHistory()
    looks(history, 10.0, 4, pressed=False)
    history.add(10.9, Look(span_s=0.7, open=True, pressed=True))
    assert history.evidence().pressed_share == pytest.approx(0.7 / 0.9)


def test_nothing_seen_is_nothing_known() -> None:
    history = LinkHistory()
    assert history.evidence() == LinkEvidence(0.0)
    assert (history.rate_bytes_per_s, history.backlog_share) == (0.0, 0.0)
    history.add(0.0, Look(span_s=0.0, open=True))
    assert history.evidence().open_share == 0.0
    assert history.evidence().path_busy_share is None


def test_a_stall_is_a_second_in_which_nothing_moves_although_it_should() -> None:
    clock = StallClock()
    now = 0.0

    def run(seconds: float, *, waiting: bool, moved: bool = False) -> None:
        nonlocal now
        for _ in range(round(seconds / 0.05)):
            now += 0.05
            clock.look(now, waiting=waiting, moved=moved)

    run(5.0, waiting=False)
    assert (clock.stalls, clock.stalled_s) == (0, 0.0)
    run(STALL_S - 0.1, waiting=True)
    run(0.1, waiting=True, moved=True)
    run(STALL_S - 0.1, waiting=True)
    assert (clock.stalls, clock.stalled_s) == (0, 0.0)
    run(2.1, waiting=True)
    assert clock.stalls == 1
    assert clock.stalled_s == pytest.approx(STALL_S + 2.0, abs=0.06)
    run(0.05, waiting=True, moved=True)
    assert (clock.stalls, clock.stalled_s) == (1, 0.0)
    run(STALL_S + 0.2, waiting=True)
    run(0.05, waiting=False)  # given up
    assert (clock.stalls, clock.stalled_s) == (2, 0.0)
