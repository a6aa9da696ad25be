"""Parameters are judged without asking anybody; a transfer id is used once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prfaas.errors import InvalidRequest
from prfaas.transfer import PARAMS_VERSION, PlanStep, SeenTransfers, TransferParams, sign
from remote_prefill.admission import Admission, Admitter

NOW = 1000.0
PARAMS = TransferParams(
    version=PARAMS_VERSION,
    transfer_id="t",
    plan=(PlanStep("fra", "p0"),),
    on_failure="local",
    quality="exact",
    deadline_s=10.0,
    salt="",
    expires=NOW + 30,
)


class Pool:
    """Knows fra/p0."""

    def find(self, plan: Any) -> list[Any]:
        for step in plan:
            if (step.peer, step.instance) != ("fra", "p0"):
                raise InvalidRequest(f"{step.peer}/{step.instance} is not one of them")
        return ["link"]


def admitter() -> Admitter:
    pool: Any = Pool()
    return Admitter([b"new", b"old"], pool)


def judge(who: Admitter, key: bytes = b"new", now: float = NOW, **changes: Any) -> Admission:
    params = msgspec.structs.replace(PARAMS, **changes)
    return who.judge(sign(params, key).to_dict(), now)


@pytest.mark.parametrize("key", [b"new", b"old"])
def test_a_plan_signed_with_either_key_is_admitted_once(key: bytes) -> None:
    who = admitter()
    first = judge(who, key)
    assert (first.reason, first.links) == ("", ["link"])
    second = judge(who, key)
    assert (second.reason, second.replay, second.links) == ("replayed", True, [])
    assert judge(who, key, transfer_id="t2").reason == ""


@pytest.mark.parametrize(
    ("changes", "reason", "trusted"),
    [
        ({"key": b"wrong"}, "unauthorized", False),
        ({"now": NOW + 31}, "expired", True),
        ({"quality": "rough"}, "unsupported_quality", True),
        ({"deadline_s": 0.0}, "invalid_request", True),
        ({"plan": ()}, "no_plan", True),
        ({"plan": (PlanStep("fra", "p0"), PlanStep("x", "y"))}, "unknown_peer", True),
        ({"version": 9}, "invalid_request", False),
        ({"on_failure": "pray"}, "invalid_request", False),
    ],
)
def test_each_fault_has_its_reason_and_only_a_signature_makes_it_trusted(
    changes: dict[str, Any], reason: str, trusted: bool
) -> None:
    found = judge(admitter(), **changes)
    assert (found.reason, found.params is not None, found.links) == (reason, trusted, [])
    assert found.message


def test_only_a_signed_reject_rejects() -> None:
    assert judge(admitter(), plan=(), on_failure="reject").rejects
    assert not judge(admitter(), b"wrong", on_failure="reject").rejects
    assert not judge(admitter(), plan=()).rejects


def test_without_keys_nothing_is_admitted() -> None:
    pool: Any = Pool()
    assert judge(Admitter([], pool), b"").reason == "unauthorized"


def test_a_full_table_of_ids_admits_nobody() -> None:
    pool: Any = Pool()
    who = Admitter([b"new"], pool, SeenTransfers(capacity=1))
    assert judge(who).reason == ""
    assert judge(who, transfer_id="t2").reason == "replayed"
    assert judge(who, transfer_id="t2", now=NOW + 31, expires=NOW + 60).reason == ""
