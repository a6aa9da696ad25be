"""Policies against each other in the simulator: capacity at objectives, and TTFT below it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.harness import Report
from policies.parameters import SPANS
from policies.registry import make_policy
from policies.scenario import Objectives, Profiles, Scenario, load_scenario
from policies.simulator.capacity import SimulatedCapacity, Slowdown, capacity
from policies.simulator.result import Summary
from policies.simulator.run import simulate, with_rate
from policies.study import StudySpec, planned, tune
from policies.workload.request import Request, scaled
from policies.workload.source import open_source, traces_folder
from prfaas.errors import ConfigError
from prfaas.settings import PolicySettings

OURS = "priced"
BASELINES = ("paper", "least_ttft", "local_first", "length_threshold", "uncached_ratio")
SLOWDOWN = Slowdown(8.0, 16.0)
DROPS = {"every_s": 150.0, "for_s": 30.0, "to_share": 0.1}
LOADS = (0.80, 0.95)


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario of the table."""

    name: str
    gbit_per_s: float
    dense: bool = False
    bursty: bool = False
    drops: bool = False
    two_peers: bool = False
    rtt_ms: float = 5.0
    trace: str = ""

    def scenario(self, requests: int) -> tuple[Scenario, Profiles]:
        """The paper's sites with this case's link, KV and arrivals; the planner splits D."""
        near, far = ("8xh20:qwen3-235b", "8xh200:qwen3-235b") if self.dense else (
            "paper-h20", "paper-h200",
        )  # fmt: skip
        link: dict[str, Any] = {"gbit_per_s": self.gbit_per_s, "rtt_ms": self.rtt_ms}
        if self.drops:
            link["dips"] = DROPS
        count = 2 if self.two_peers else 1
        peers = [
            {"name": f"peer{i}", "profile": far, "instances": 4 // count, "link": link,
             "cache_tokens": 4_000_000}
            for i in range(count)
        ]  # fmt: skip
        data = {
            "name": self.name,
            "local": {"prefill": near, "instances": 8, "cache_tokens": 4_000_000,
                      "prefill_instances": None if count == 1 else 3},
            "peers": peers,
            "objectives": {"ttft_p90_s": 10.0, "ttft_p99_s": 20.0},
            "workload": {
                "requests": requests,
                "arrivals": {"rate_per_s": 2.0, "kind": "bursty" if self.bursty else "poisson"},
            },
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "scenario.yaml"
            path.write_text(yaml.safe_dump(data))
            scenario, profiles = load_scenario(str(path))
        if scenario.local.prefill_instances is None:
            scenario = planned(scenario, profiles, list(scenario.workload.stream()))
        return scenario, profiles


CASES = (
    Case("paper.100G", 100),
    Case("paper.10G", 10),
    Case("paper.5G", 5),
    Case("paper.2.5G", 2.5),
    Case("paper.10G.80ms", 10, rtt_ms=80),
    Case("paper.10G.drops", 10, drops=True),
    Case("paper.100G.drops", 100, drops=True),
    Case("bursty.100G", 100, bursty=True),
    Case("bursty.10G", 10, bursty=True),
    Case("two_peers.10G", 10, two_peers=True),
    Case("dense.100G", 100, dense=True),
    Case("conversation.100G", 100, trace="mooncake_conversation_trace.jsonl.gz"),
    Case("conversation.10G", 10, trace="mooncake_conversation_trace.jsonl.gz"),
)
QUICK = ("paper.100G", "paper.10G", "paper.10G.drops")


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy with its parameters and queue order."""

    policy: str
    order: str = "fcfs"
    parameters: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """One arm in one case and seed."""

    capacity: float
    slowdown_capacity: float
    loaded: dict[float, Summary]


class Bench:
    """Runs cases and collects ratios to the paper's policy; nothing to close."""

    def __init__(self, report: Report, quick: bool) -> None:
        self._report = report
        self._requests = 1000 if quick else 6000
        self._seeds = 1 if quick else 3
        self._trials = 0 if quick else 25
        self.ratios: dict[str, list[tuple[str, float]]] = {}

    def run(self, case: Case) -> None:
        try:
            scenario, profiles = case.scenario(self._requests)
        except ConfigError as error:
            self._report.say(f"{case.name}: {error.message}")
            return
        tuned = self._tuned(case, scenario)
        for seed in range(self._seeds):
            at = self._workload(case, scenario, seed)
            if at is None:
                self._report.say(f"{case.name}: {case.trace} is not there, left out")
                return
            paper = self._measure(scenario, profiles, at, Arm("paper"), None)
            if paper is None:
                self._report.say(f"{case.name}: the paper's policy holds objectives at no rate")
                return
            ours = self._measure(scenario, profiles, at, Arm(OURS, "srpt"), paper.capacity)
            best = None
            for arm in tuned:
                found = self._measure(scenario, profiles, at, arm, paper.capacity)
                if found is not None and (best is None or found.capacity > best.capacity):
                    best = found
            if ours is None:
                self._report.say(f"{case.name}: ours holds objectives at no rate")
                return
            self._compare(case, seed, ours, paper, best)

    def _compare(
        self, case: Case, seed: int, ours: Found, paper: Found, best: Found | None
    ) -> None:
        ratios = {
            "capacity_over_paper": ours.capacity / paper.capacity,
            "slowdown_capacity_over_paper": ours.slowdown_capacity / paper.slowdown_capacity,
        }
        for load in LOADS:
            mine, theirs = ours.loaded[load], paper.loaded[load]
            ratios[f"mean_ttft_speedup.load{load * 100:.0f}"] = (
                theirs.ttft_mean_s / mine.ttft_mean_s
            )
            ratios[f"p99_speedup.load{load * 100:.0f}"] = theirs.ttft_p99_s / mine.ttft_p99_s
        ratios["longest_decile_p99_over_paper.load80"] = (
            ours.loaded[LOADS[0]].longest_decile_p99_s / paper.loaded[LOADS[0]].longest_decile_p99_s
        )
        if best is not None:
            ratios["capacity_over_best_baseline"] = ours.capacity / best.capacity
            ratios["mean_ttft_over_best_baseline"] = (
                best.loaded[LOADS[0]].ttft_mean_s / ours.loaded[LOADS[0]].ttft_mean_s
            )
        for name, value in ratios.items():
            self.ratios.setdefault(name, []).append((case.name, value))
        told = ", ".join(f"{name} {value:.3f}" for name, value in ratios.items())
        self._report.say(f"{case.name} seed {seed}: paper {paper.capacity:.3f}/s; {told}")

    def _measure(
        self,
        scenario: Scenario,
        profiles: Profiles,
        at: Callable[[float], Sequence[Request]],
        arm: Arm,
        reference: float | None,
    ) -> Found | None:
        order = scenario.queue_order.model_copy(update={"name": arm.order})
        scenario = scenario.model_copy(update={"queue_order": order})
        settings = PolicySettings.model_validate({"name": arm.policy, **dict(arm.parameters)})

        def highest(slowdown: Slowdown | None) -> SimulatedCapacity:
            objectives = scenario.objectives if slowdown is None else Objectives()
            return capacity(
                scenario, profiles, at, lambda: make_policy(settings), objectives,
                start_rate_per_s=2.0, slowdown=slowdown,
            )  # fmt: skip

        try:
            plain, slow = highest(None).rate_per_s, highest(SLOWDOWN).rate_per_s
        except ConfigError:
            return None
        loaded = {
            load: simulate(
                scenario, profiles, at(load * (reference or plain)), make_policy(settings)
            ).summary()
            for load in LOADS
        }
        return Found(plain, slow, loaded)

    def _workload(
        self, case: Case, scenario: Scenario, seed: int
    ) -> Callable[[float], Sequence[Request]] | None:
        if not case.trace:
            workload = scenario.workload.model_copy(update={"seed": 100 + seed})
            seeded = scenario.model_copy(update={"workload": workload})
            return lambda rate: list(with_rate(seeded, rate).workload.stream())
        path = traces_folder() / case.trace
        if not path.is_file():
            return None
        rows = list(open_source(path, None, scenario.workload))
        # The second part; the first has trained.
        rows = rows[len(rows) // 2 :][: self._requests]
        start = rows[0].arrival_s
        rows = [Request(r.number, r.arrival_s - start, r.prompt_tokens, r.output_tokens, r.blocks)
                for r in rows]  # fmt: skip
        usual = (len(rows) - 1) / rows[-1].arrival_s
        return lambda rate: list(scaled(rows, rate / usual))

    def _tuned(self, case: Case, scenario: Scenario) -> list[Arm]:
        """Every baseline, with the same trials on the same training part; without any as it is."""
        if not self._trials:
            return [Arm(policy) for policy in BASELINES]
        arms = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "scenario.yaml"
            path.write_text(yaml.safe_dump(scenario.model_dump(mode="json")))
            trace = traces_folder() / case.trace if case.trace else None
            if trace is not None and not trace.is_file():
                return []
            for policy in BASELINES:
                spec = StudySpec(str(path), policy, "rate", trace=trace)
                storage = str(Path(folder) / f"{policy}.journal")
                try:
                    found = tune(spec, storage, self._trials, 1)
                except ConfigError as error:
                    self._report.say(f"{case.name}: {policy}: {error.message}")
                    continue
                assert SPANS[policy]
                arms.append(Arm(policy, "fcfs", tuple(found.parameters.items())))
        return arms


def azure(report: Report, quick: bool) -> None:
    """Ours over local only on traces of short prompts, at a quarter of their rate and at it: there
    the three nodes of D alone do not keep up."""
    scenario, profiles = load_scenario("paper")
    local = scenario.local.model_copy(update={"prefill_instances": 3})
    scenario = scenario.model_copy(update={"local": local})
    found: dict[str, list[tuple[str, float]]] = {"p50": [], "p90": [], "p99": []}
    for name in ("code", "conv"):
        path = traces_folder() / f"AzureLLMInferenceTrace_{name}.csv.gz"
        if not path.is_file():
            report.say(f"{path} is not there, left out")
            continue
        rows = list(open_source(path, None, scenario.workload))[: 3000 if quick else None]
        for speed in (0.25, 1.0):
            requests = list(scaled(rows, speed))
            ours, alone = (
                simulate(
                    scenario, profiles, requests, make_policy(PolicySettings(name=policy))
                ).summary()
                for policy in (OURS, "always_local")
            )
            for key, values in found.items():
                ratio = getattr(ours, f"ttft_{key}_s") / getattr(alone, f"ttft_{key}_s")
                values.append((f"{name} at {speed:g} times its rate", ratio))
    for key, values in found.items():
        if values:
            case, worst = max(values, key=lambda item: item[1])
            report.add(f"azure.{key}_over_local", worst, "ratio", f"worst: {case}")


def run(quick: bool) -> None:
    """All cases, or a few short ones in which nothing is tuned."""
    report = Report("policies", quick=quick)
    bench = Bench(report, quick)
    for case in CASES:
        if not quick or case.name in QUICK:
            bench.run(case)
    for name, found in bench.ratios.items():
        values = [value for _, value in found]
        worst_case, worst = (max if "longest" in name else min)(found, key=lambda item: item[1])
        note = f"{len(values)} runs; {min(values):.3f} to {max(values):.3f}"
        report.add(f"ours.{name}.geomean", statistics.geometric_mean(values), "ratio", note)
        report.add(f"ours.{name}.worst", worst, "ratio", f"{worst_case}; {note}")
    drops = [value for case, value in bench.ratios["capacity_over_paper"] if "drops" in case]
    if drops:
        report.add(
            "ours.capacity_over_paper.link_drop",
            statistics.geometric_mean(drops),
            "ratio",
            f"a link at a tenth for 30 s in 150; {len(drops)} runs",
        )
    azure(report, quick)
    report.finish()
