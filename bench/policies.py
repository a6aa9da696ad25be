"""Policies against each other in the simulator: capacity at objectives, and TTFT below it."""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat

from bench.harness import Report
from bench.policy_arms import LOADS, Arm, Deadline, Figures, Measured, Memo, OutOfTime
from bench.policy_cases import Case, Site, cases, ready
from policies.parameters import SPANS
from prfaas.errors import ConfigError

OURS = Arm("priced", "srpt")
BASELINES = ("paper", "least_ttft", "local_first", "length_threshold", "uncached_ratio")
ORDERS = ("fcfs", "srpt", "slack")
THIN = Case("paper", 2.5)
USUAL_RTT_MS = Case("paper", 10).rtt_ms
LOCAL_LOADS = (0.5, 0.9)
LOCAL_KEYS = ("p50", "p90", "p99")
LIMIT_S = 2100.0
"""Of a run; BENCH_LIMIT_S changes it. Cases that are not done by then are left out, and named: 0
gives the figures of those that earlier runs have done."""
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t of 95% by number of seeds."""
QUICK = (Case("paper", 100), Case("paper", 10), Case("paper", 10, drops=True))


@dataclass(frozen=True, slots=True)
class Size:
    """How much work a run is."""

    requests: int
    seeds: int
    trials: int
    """Of each baseline's study; 0: they run as they are."""


FULL, SMALL = Size(1000, 3, 6), Size(800, 1, 0)


Ratios = list[tuple[Case, int, float]]
"""Case, seed and value."""


@dataclass(slots=True)
class Found:
    """What one case gave; figures are ratios unless they say otherwise."""

    case: Case
    said: list[str] = field(default_factory=list)
    ratios: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """By seed."""
    over_local: list[Mapping[str, float]] = field(default_factory=list)
    """TTFT at each of LOCAL_KEYS over local only, for each seed and load of an Azure trace."""
    orders: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """Mean and P99 of TTFT over the paper's policy with FCFS, by router and queue order, at 80%."""


class CaseRun:
    """Compares all policies in one case; nothing to close."""

    def __init__(self, case: Case, size: Size, memo: Memo) -> None:
        self._size, self._memo = size, memo
        self.found = Found(case)

    def run(self) -> Found:
        """Raises OutOfTime."""
        case, size = self.found.case, self._size
        try:
            site = ready(case, size.requests)
        except ConfigError as error:
            self.found.said.append(f"{case.name}: left out: {error.message}")
            return self.found
        measured = Measured(site, self._memo)
        paper = self._first("paper", site)
        tuned = [self._first(policy, site) for policy in BASELINES]
        if size.trials:
            tuned = [measured.tuned(arm, size.trials) for arm in tuned]
        for seed in range(size.seeds):
            if case.workload.startswith("azure"):
                self._over_local(measured, seed)
            rate = measured.capacity(paper, seed, site.start_rate_per_s, slowdown=False)
            if rate is None:
                self.found.said.append(f"{case.name} {seed}: the paper's policy holds no rate")
                continue
            self._compare(measured, seed, paper, tuned, rate)
            if seed == 0:
                self._orders(measured, paper, tuned, rate)
        return self.found

    @staticmethod
    def _first(policy: str, site: Site) -> Arm:
        """As a planner would have set it up: thresholds are those it solved."""
        if "threshold_tokens" not in SPANS[policy]:
            return Arm(policy)
        threshold = max(64, int(site.threshold_tokens))
        return Arm(policy, parameters=(("threshold_tokens", threshold),))

    def _compare(
        self, measured: Measured, seed: int, paper: Arm, tuned: list[Arm], rate: float
    ) -> None:
        name = f"{self.found.case.name} {seed}"
        ours = measured.capacity(OURS, seed, rate, slowdown=False)
        if ours is None:
            self.found.said.append(f"{name}: ours holds no rate, the paper's {rate:.3g}/s")
            return
        ratios = {"capacity_over_paper": ours / rate}
        slow = [measured.capacity(arm, seed, rate, slowdown=True) for arm in (OURS, paper)]
        if slow[0] and slow[1]:
            ratios["slowdown_capacity_over_paper"] = slow[0] / slow[1]
        else:
            self.found.said.append(f"{name}: slowdown is held at no rate by ours or the paper's")
        for load in LOADS:
            mine, theirs = (measured.at(arm, seed, load * rate) for arm in (OURS, paper))
            ratios |= _ratios(mine, theirs, f"load{load * 100:.0f}")
        calm = replace(paper, parameters=(*paper.parameters, ("surge_s", 0.0)))
        without = measured.capacity(calm, seed, rate, slowdown=False)
        if without:
            ratios["paper_without_surge"] = without / rate
        best, best_mean_s = None, None
        for arm in tuned:
            held = measured.capacity(arm, seed, rate, slowdown=False)
            if held is not None:
                best = max(best or 0.0, held)
                # Only what holds this rate counts.
                if held >= LOADS[0] * rate:
                    mean_s = measured.at(arm, seed, LOADS[0] * rate).mean_s
                    best_mean_s = min(best_mean_s or mean_s, mean_s)
        if best is not None and best_mean_s is not None:
            ratios["capacity_over_best_baseline"] = ours / best
            mine_s = measured.at(OURS, seed, LOADS[0] * rate).mean_s
            ratios["mean_ttft_over_best_baseline"] = best_mean_s / mine_s
        self.found.ratios[seed] = ratios
        told = ", ".join(f"{key} {value:.3f}" for key, value in ratios.items())
        self.found.said.append(f"{name}: paper {rate:.3g}/s; {told}")

    def _over_local(self, measured: Measured, seed: int) -> None:
        alone = Arm("always_local", OURS.order)
        rate = measured.capacity(alone, seed, measured.site.start_rate_per_s, slowdown=False)
        if rate is None:
            return
        for load in LOCAL_LOADS:
            mine, theirs = (measured.at(arm, seed, load * rate) for arm in (OURS, alone))
            self.found.over_local.append(
                {key: getattr(mine, f"{key}_s") / getattr(theirs, f"{key}_s") for key in LOCAL_KEYS}
            )

    def _orders(self, measured: Measured, paper: Arm, tuned: list[Arm], rate: float) -> None:
        load = LOADS[0] * rate
        base = measured.at(paper, 0, load)
        for arm in (*tuned, OURS):
            for order in ORDERS:
                figures = measured.at(replace(arm, order=order), 0, load)
                self.found.orders[arm.policy, order] = (
                    figures.mean_s / base.mean_s,
                    figures.p99_s / base.p99_s,
                )


def _ratios(mine: Figures, theirs: Figures, load: str) -> dict[str, float]:
    return {
        f"mean_ttft_speedup.{load}": theirs.mean_s / mine.mean_s,
        f"p99_speedup.{load}": theirs.p99_s / mine.p99_s,
        f"longest_decile_p99_over_paper.{load}": (
            mine.longest_decile_p99_s / theirs.longest_decile_p99_s
        ),
    }


class Summed:
    """Adds up cases; nothing to close."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._ratios: dict[str, Ratios] = {}
        self._cases = 0
        self.over_local: list[tuple[Case, Mapping[str, float]]] = []
        self._orders: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def add(self, found: Found) -> None:
        for line in found.said:
            self._report.say(line)
        self._cases += bool(found.ratios)
        self.over_local += [(found.case, ratios) for ratios in found.over_local]
        for seed, ratios in found.ratios.items():
            for name, value in ratios.items():
                self._ratios.setdefault(name, []).append((found.case, seed, value))
        for key, pair in found.orders.items():
            self._orders.setdefault(key, []).append(pair)

    def rows(self, wanted: int) -> None:
        """All figures, of so many cases that were wanted."""
        self._report.add("cases", self._cases, "scenarios", f"of {wanted}; the others say why not")
        for name, found in self._ratios.items():
            whose = "" if name.startswith("paper") else "ours."
            longer = "longest" in name
            worst_of = max if longer else min
            case, _, worst = worst_of(found, key=lambda item: item[2])
            note = _interval(found)
            self._report.add(f"{whose}{name}.geomean", _geomean(found), "ratio", note)
            self._report.add(f"{whose}{name}.worst", worst, "ratio", f"{case.name}; {note}")
            where, mean, seeds = worst_scenario(found, max if longer else min)
            self._report.add(
                f"{whose}{name}.worst_scenario",
                mean,
                "ratio",
                f"{where}; geometric mean of its {seeds} seeds, which differ in luck alone",
            )
            for kind, part in _by_kind(found):
                self._report.add(f"{whose}{name}.{kind}", _geomean(part), "ratio", _interval(part))
        for (policy, order), pairs in self._orders.items():
            for at, what in enumerate(("mean", "p99")):
                value = statistics.geometric_mean(pair[at] for pair in pairs)
                note = f"TTFT over the paper's policy with FCFS at 80%; {len(pairs)} scenarios"
                self._report.add(f"order.{policy}.{order}.{what}", value, "ratio", note)


def _by_kind(found: Ratios) -> Iterator[tuple[str, Ratios]]:
    hybrid = [item for item in found if not item[0].dense]
    kinds = {
        "link_drop": [item for item in found if item[0].drops],
        "hybrid": hybrid,
        "dense": [item for item in found if item[0].dense],
        **{
            f"{gbit:g}G": [item for item in hybrid if item[0].gbit_per_s == gbit]
            for gbit in (100.0, 10.0, 5.0, 2.5)
        },
    }
    return ((kind, part) for kind, part in kinds.items() if part)


def worst_scenario(
    found: Ratios, worst_of: Callable[[Iterable[float]], float] = min
) -> tuple[str, float, int]:
    """Name, geometric mean over seeds, and number of seeds of the scenario where that is worst.

    A run's P99 is ten requests: the worst of all runs says how unlucky one was, too.
    """
    by_case: dict[Case, Ratios] = {}
    for item in found:
        by_case.setdefault(item[0], []).append(item)
    means = {case: _geomean(items) for case, items in by_case.items()}
    worst = worst_of(means.values())
    (case, *_) = (case for case, mean in means.items() if mean == worst)
    return case.name, worst, len(by_case[case])


def _geomean(found: Ratios) -> float:
    return statistics.geometric_mean(value for _, _, value in found)


def _interval(found: Ratios) -> str:
    """Student's 95% interval over seeds, each the mean of its scenarios' logarithms; and the range
    of all runs."""
    by_seed: dict[int, list[float]] = {}
    for _, seed, value in found:
        by_seed.setdefault(seed, []).append(math.log(value))
    means = [statistics.fmean(values) for values in by_seed.values()]
    low, high = (pick(value for _, _, value in found) for pick in (min, max))
    runs = f"{len(found)} paired runs from {low:.3f} to {high:.3f}"
    t = STUDENT.get(len(means))
    if t is None:
        return runs
    half = t * statistics.stdev(means) / math.sqrt(len(means))
    middle = statistics.fmean(means)
    ends = f"{math.exp(middle - half):.3f} to {math.exp(middle + half):.3f}"
    return f"95% interval over {len(means)} seeds {ends}; {runs}"


def compact(report: Report, size: Size) -> None:
    """The same policy with exact and with compact bytes, on the thinnest link."""
    ratios: Ratios = []
    for seed in range(size.seeds):
        held = []
        for quality in ("exact", "compact"):
            site = ready(replace(THIN, quality=quality), size.requests)
            rate = Measured(site, Memo()).capacity(
                OURS, seed, site.start_rate_per_s, slowdown=False
            )
            held.append(rate)
        if held[0] and held[1]:
            ratios.append((THIN, seed, held[1] / held[0]))
    if ratios:
        note = f"each with the planner's split of D; {_interval(ratios)}"
        report.add("compact_over_exact.capacity.2.5G", _geomean(ratios), "ratio", note)


def azure(report: Report, found: list[tuple[Case, Mapping[str, float]]]) -> None:
    """Rows of how ours compares with local only on traces of short prompts."""
    for key in LOCAL_KEYS:
        pairs = [(case, ratios[key]) for case, ratios in found]
        if pairs:
            case, worst = max(pairs, key=lambda item: item[1])
            mean = statistics.geometric_mean(value for _, value in pairs)
            loads = " and ".join(f"{load:.0%}" for load in LOCAL_LOADS)
            note = f"at {loads} of what D holds alone, in the same queue order; worst of "
            note += f"{len(pairs)}: {case.name}; geometric mean {mean:.3f}"
            report.add(f"azure.{key}_over_local", worst, "ratio", note)


def _late(case: Case) -> int:
    """What a run that is short of time leaves out first. All workloads come with a link before any
    comes with the next, so that what is left out is links and not workloads: first the usual link
    of each kind of KV, last the links that dense KV is hardly sent over."""
    if case.drops:
        return 11 if case.dense else 2
    if case.rtt_ms != USUAL_RTT_MS:
        return 5 if case.dense else 8
    if case.peers > 1:
        return 10 if case.dense else 6
    if case.dense:
        return {100.0: 1, 10.0: 9, 5.0: 12, 2.5: 13}[case.gbit_per_s]
    return {10.0: 0, 100.0: 3, 2.5: 4, 5.0: 7}[case.gbit_per_s]


def _run_case(case: Case, size: Size, limit: Deadline) -> Found:
    try:
        return CaseRun(case, size, Memo(limit=limit)).run()
    except OutOfTime:
        return Found(case, [f"{case.name}: left out: no time is left"])


def run(quick: bool) -> None:
    """All cases that there is time for, or a few short ones in which nothing is tuned.

    A full run that is started again goes on where it was: see `bench/policy_arms.py`.
    """
    seconds = os.environ.get("BENCH_LIMIT_S")
    report = Report("policies", quick=quick)
    size = SMALL if quick else FULL
    limit = Deadline(time.time() + (LIMIT_S if seconds is None else float(seconds)))
    summed = Summed(report)
    wanted = list(QUICK) if quick else sorted(cases(), key=_late)
    jobs = int(os.environ.get("BENCH_JOBS", os.cpu_count() or 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for found in pool.map(_run_case, wanted, repeat(size), repeat(limit)):
            summed.add(found)
    summed.rows(len(wanted))
    compact(report, size)
    azure(report, summed.over_local)
    report.finish()
