"""The fidelity benchmark: fleets that can be read, requests that repeat, errors of real runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench import fidelity
from bench.fidelity_sites import (
    CALIBRATED_BY,
    D_ENGINE,
    Kind,
    kinds,
    loaded_by,
    write_fleet,
    write_policy,
)
from policies.policy_file import load_policy_file
from prfaas.errors import ConfigError
from prfaas.profile import load_profile
from prfaas.up.client import StreamedAnswer
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import read_fleet
from prfaas.up.fleet_processes import FleetProcesses

KINDS = list(kinds())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_fleets_can_be_read(tmp_path: Path, kind: Kind) -> None:
    model = tmp_path / "model.gguf" if kind.computes else None
    fleet = read_fleet(write_fleet(kind, tmp_path, model))
    assert (fleet.engines.count, fleet.peers[0].instances) == (1, 1)
    made = FleetProcesses(
        FleetPlan.create(fleet, tmp_path / "f.yaml", tmp_path), print, {D_ENGINE: 7}
    )
    assert {spec.name for spec in made._specs.values() if spec.core == 7} == {D_ENGINE}
    if model is None:
        far, near = (load_profile(tmp_path / f"{name}.yaml") for name in ("far", "near"))
        longest = kind.most_tokens + kind.output_tokens
        assert far.prefill_s(longest) < near.prefill_s(longest)


def test_the_gateway_decides_as_the_bench_says_at_each_step(tmp_path: Path) -> None:
    fleet = read_fleet(write_fleet(KINDS[0], tmp_path, None))
    file = Path(fleet.gateway["policy"]["file"])
    assert load_policy_file(file).settings() == loaded_by()
    write_policy(tmp_path, CALIBRATED_BY)
    assert load_policy_file(file).policy == CALIBRATED_BY


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_requests_repeat_and_stay_within_what_was_calibrated(kind: Kind) -> None:
    rows = fidelity._requests(kind, 300, 2.0, seed=1)
    assert rows == fidelity._requests(kind, 300, 2.0, seed=1)
    assert rows != fidelity._requests(kind, 300, 2.0, seed=2)
    assert rows[-1].arrival_s == pytest.approx(150, rel=0.2)
    assert max(row.prompt_tokens for row in rows) <= kind.most_tokens
    assert min(row.prompt_tokens for row in rows) >= kind.least_tokens
    # The text that calibrates the real model has 1.7 characters to a token, never as many as two.
    characters = kind.lengths[-1] if kind.name == "paced" else kind.lengths[-1] / 2
    assert kind.most_tokens <= characters


def test_errors_are_against_the_mean_of_real_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[0]
    rows = fidelity._requests(kind, 100, 2.0, seed=1)

    def run(seconds: float) -> list[StreamedAnswer]:
        return [StreamedAnswer("", 0.0, first_event_at=seconds) for _ in rows]

    class Simulated:
        rows = run(1.2)

    monkeypatch.setattr(fidelity, "simulate", lambda *_: Simulated)
    said: list[str] = []

    class Told:
        say = staticmethod(said.append)

    site: Any = (None, None)
    error = fidelity._error(kind, 0.5, 2.0, site, rows, [run(0.9), run(1.1)], Told)  # type: ignore[arg-type]
    assert error.simulated == pytest.approx({"median": 0.2, "p90": 0.2})
    assert error.real == pytest.approx({"median": 1.1 / 0.9 - 1, "p90": 1.1 / 0.9 - 1})
    assert "simulated TTFT median 1.2" in said[0]


def test_the_engine_of_d_has_a_core_that_nothing_else_runs_on() -> None:
    before = os.sched_getaffinity(0)
    with fidelity._apart() as cores:
        if len(before) > 1:
            assert os.sched_getaffinity(0) == before - set(cores.values())
            assert set(cores) == {D_ENGINE}
        else:
            assert not cores
    assert os.sched_getaffinity(0) == before


def test_a_fleet_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_ONLY", "imagined")
    with pytest.raises(ConfigError, match="not one of paced, real"):
        fidelity.run(quick=True)
