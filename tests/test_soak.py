"""The soak's verdict: requests and faults there were, and nothing else."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.testing.soak_load import Case, Tally
from scripts.soak import Findings, verdict

CASE = Case((1,), (5, 6), "ab")


def parts() -> tuple[Tally, Any, Findings]:
    """What a good soak leaves."""
    tally = Tally(lambda tokens: 1.0, lambda ids: "")
    tally.ended("whole", "exact")
    tally.compare_tokens("request", CASE, CASE.tokens)
    return tally, SimpleNamespace(counts=Counter({"cut": 1}), failure=""), Findings()


def test_a_good_soak_is_good() -> None:
    assert verdict(*parts())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tally, faults, findings: tally.requests.clear(),
        lambda tally, faults, findings: faults.counts.clear(),
        lambda tally, faults, findings: setattr(faults, "failure", "could not restart"),
        lambda tally, faults, findings: tally.compare_tokens("request", CASE, (5, 7)),
        lambda tally, faults, findings: tally.hangs_at("request"),
        lambda tally, faults, findings: findings.hangs.append("not whole again"),
        lambda tally, faults, findings: findings.leaks.append("3 blocks"),
        lambda tally, faults, findings: findings.crashes.append("a traceback"),
        lambda tally, faults, findings: tally.comparison.near_ties.append("one of two"),
    ],
)
def test_anything_found_and_nothing_done_are_both_bad(
    spoil: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tally, faults, findings = parts()
    spoil(tally, faults, findings)
    assert not verdict(tally, faults, findings)
    assert "wrong tokens: " in capsys.readouterr().out
