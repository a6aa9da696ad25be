"""The bench harness interleaves, takes medians and writes what it is told, with its conditions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import names
from bench.harness import Report, Samples, machine, percentile, run_interleaved


async def test_every_round_runs_every_arm_once_in_changing_order() -> None:
    calls: list[str] = []

    def arm(name: str, value: float):  # type: ignore[no-untyped-def]
        async def run() -> float:
            calls.append(name)
            return value + len(calls)

        return run

    arms = {name: arm(name, 0.0) for name in "abcd"}
    said: list[str] = []
    samples = await run_interleaved(arms, 6, said.append)
    rounds = [calls[at : at + 4] for at in range(0, 24, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert {len(found.values) for found in samples.values()} == {6}
    assert len(said) == 24


def test_samples_say_median_and_spread() -> None:
    samples = Samples((3.0, 1.0, 2.0))
    assert samples.median == 2.0
    assert samples.spread == "1 to 3 in 3 rounds"


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 5.0), (90, 9.0), (99, 10.0), (100, 10.0), (1, 1.0)]
)
def test_percentile_is_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([float(n) for n in range(10, 0, -1)], percent) == expected


def test_a_report_writes_rows_with_conditions_and_marks_quick_runs(tmp_path: Path) -> None:
    report = Report("demo", quick=True)
    report.add("x.worst", 1.23456789, "ratio", "1 to 2 in 5 rounds")
    rows = json.loads(report.finish(directory=tmp_path).read_text())
    assert [(r["name"], r["value"], r["unit"]) for r in rows] == [("x.worst", 1.23457, "ratio")]
    assert rows[0]["note"].startswith("quick")
    for part in ("1 to 2 in 5 rounds", "make bench NAME=demo QUICK=1", machine()):
        assert part in rows[0]["note"]


def test_the_machine_has_no_host_name() -> None:
    import socket

    assert socket.gethostname() not in machine()
    assert "cores" in machine()


def test_benchmarks_are_found_by_name() -> None:
    assert "ttft" in names()
    assert "harness" not in names()
