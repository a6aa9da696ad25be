"""The gates every offloading policy has in common, and the reasons they give."""

from dataclasses import replace

import pytest

from policies.candidates import forbidden, not_worth, reachable, usable
from prfaas.snapshot import Reason, Snapshot
from prfaas.testing.contracts import (
    UNKNOWN_INPUTS,
    UNMEASURED_INPUTS,
    busy_snapshot,
    long_request,
    with_local,
    with_remote,
)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("no remote", Reason.NO_PEER),
        ("not ready", Reason.NO_PEER),
        ("draining", Reason.NO_PEER),
        ("old load at P", Reason.STALE),
        ("old link", Reason.STALE),
    ],
)
def test_why_no_instance_is_reachable(what: str, reason: Reason) -> None:
    assert reachable(UNKNOWN_INPUTS[what]) == ([], reason)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("goodput", Reason.UNMEASURED),
        ("curve of P", Reason.UNMEASURED),
        ("staging full", Reason.NO_SPACE),
        ("retention full", Reason.NO_SPACE),
    ],
)
def test_why_no_instance_is_usable(what: str, reason: Reason) -> None:
    assert usable(long_request(), UNMEASURED_INPUTS[what]) == ([], reason)


def test_of_several_instances_the_reason_that_came_closest_is_given() -> None:
    down = replace(busy_snapshot().remotes[0], instance="down", ready=False)
    full = replace(busy_snapshot().remotes[0], instance="full", free_retention_bytes=0)
    unmeasured = UNMEASURED_INPUTS["goodput"].remotes[0]
    snapshot = replace(busy_snapshot(), remotes=(full, down, unmeasured))
    assert usable(long_request(), snapshot) == ([], Reason.NO_SPACE)


def test_space_is_needed_only_for_what_d_lacks() -> None:
    snapshot = with_remote(busy_snapshot(), free_retention_bytes=100 * 23040)
    assert usable(long_request(), snapshot)[1] is Reason.NO_SPACE
    cached = with_local(snapshot, matched_tokens=3900)
    assert len(usable(long_request(), cached)[0]) == 1


@pytest.mark.parametrize(
    ("snapshot", "reason"),
    [
        (busy_snapshot(), None),
        (UNKNOWN_INPUTS["old load at D"], Reason.STALE),
        (UNKNOWN_INPUTS["no connector"], Reason.FEATURE),
    ],
)
def test_what_forbids_offload(snapshot: Snapshot, reason: Reason | None) -> None:
    assert forbidden(long_request(), snapshot) is reason


def test_four_ways_to_stay_local_give_four_reasons() -> None:
    """Case 1; the fourth, offload switched off, is the gateway's."""
    request, snapshot = long_request(), busy_snapshot()
    reasons = {
        not_worth(replace(request, prompt_tokens=40), snapshot, 64),
        not_worth(request, with_local(snapshot, matched_tokens=3990), 64),
        not_worth(replace(request, cache_known=False), snapshot, 64),
    }
    assert reasons == {Reason.TOO_SHORT, Reason.MOSTLY_CACHED, Reason.NO_CACHE_INFO}


def test_a_short_body_is_too_short_however_many_tokens_it_seems_to_have() -> None:
    request = replace(long_request(), short=True)
    assert not_worth(request, busy_snapshot(), 64) is Reason.TOO_SHORT
