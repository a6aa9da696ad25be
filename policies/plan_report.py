"""What `prfaas plan` says: one plan as data, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from policies.design_questions import Answer, answers
from policies.mix import RequestMix
from policies.planner import Infeasible, Plan, best_plan, with_link
from policies.scaling import Advice, advise, to_lines
from policies.scenario import Prices, Scenario
from policies.throughput import Capacity, Fleet, best_capacity

BANDWIDTHS_GBIT = (100.0, 50.0, 25.0, 10.0, 5.0, 2.5, 1.0)


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a plan at given prices, in their currency."""

    per_hour: float
    per_thousand_requests: float
    per_million_prompt_tokens: float
    egress_per_hour: float


@dataclass(frozen=True, slots=True)
class BandwidthRow:
    """The best there is over another link."""

    gbit_per_s: float
    threshold_tokens: float
    remote_share: float
    rate_without_queues: float
    rate: float | None
    """That holds the objectives; None: infeasible."""
    binds: str
    """What would raise `rate`, or is why there is none."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything that is printed."""

    scenario: str
    profiles: tuple[str, ...]
    paper: Capacity
    plan: Plan | None
    infeasible: str
    """Why there is no plan; empty: there is one."""
    alone: float | None
    """The rate that D holds without the peer; None: none."""
    links: tuple[BandwidthRow, ...]
    costs: Costs | None
    answers: tuple[Answer, ...]
    advice: Advice | None
    """On the peer's instances at a given rate; None: none was given."""
    slowdown_left_out: bool = False
    """There are objectives on slowdown, which only the simulator knows."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; stages and shares are strings."""
        data = asdict(self)
        if self.plan is not None:
            load = data["plan"]["load"]
            for name in ("utilisation", "ttft_s", "idle_ttft_s"):
                load[name] = {str(key): value for key, value in load[name].items()}
            data["plan"]["gain"] = {str(k): v for k, v in data["plan"]["gain"].items()}
        return data


def make_report(
    scenario: Scenario,
    fleet: Fleet,
    mix: RequestMix,
    bandwidths_gbit: Sequence[float] = BANDWIDTHS_GBIT,
    at_rate: float | None = None,
) -> PlanReport:
    """Plan a scenario for a workload. Raises ConfigError for what cannot be planned at all; an
    objective that nothing meets is part of the report.

    `at_rate`: requests a second that the peer's instances are compared with.
    """
    fixed = scenario.local.prefill_instances
    splits = None if fixed is None else [fixed]
    paper = best_capacity(fleet, mix, splits)
    found_plan = _plan(fleet, mix, scenario, fixed)
    plan = found_plan if isinstance(found_plan, Plan) else None
    infeasible = found_plan.message if isinstance(found_plan, Infeasible) else ""
    alone: float | None = None
    if fleet.remote is not None:
        without = _plan(replace(fleet, remote=None, remote_instances=0), mix, scenario, None)
        alone = without.load.rate if isinstance(without, Plan) else None
    links = tuple(
        _over(with_link(fleet, gbit), mix, scenario, fixed, gbit)
        for gbit in (bandwidths_gbit if fleet.remote is not None else ())
    )
    costs = None
    if plan is not None and scenario.prices is not None:
        costs = _costs(scenario.prices, fleet, mix, plan)
    found: list[Answer] = []
    if plan is not None:
        load = plan.load
        found = answers(fleet, mix, load.split.threshold_tokens, load.rate)
    advice = None
    if at_rate is not None:
        advice = advise(fleet, mix, scenario.objectives, at_rate, fixed)
    used = [fleet.local, fleet.decode, *([fleet.remote] if fleet.remote else [])]
    named = dict.fromkeys(f"{p.name} ({p.label.replace('_', ' ')}): {p.source}" for p in used)
    return PlanReport(
        scenario.name,
        tuple(named),
        paper,
        plan,
        infeasible,
        alone,
        links,
        costs,
        tuple(found),
        advice,
        scenario.objectives.on_slowdown,
    )


def to_text(report: PlanReport) -> str:
    """The report for a terminal."""
    lines = [f"scenario {report.scenario}", *(f"  {name}" for name in report.profiles), ""]
    lines += ["without queues (the paper's equations)", *_capacity_lines(report.paper), ""]
    if report.plan is None:
        lines += ["with queues", f"  {report.infeasible}", ""]
    else:
        simulated = ", those on slowdown aside, which are only simulated"
        aside = simulated if report.slowdown_left_out else ""
        lines += [f"with queues, the highest rate that holds the objectives{aside}"]
        lines += [*_plan_lines(report.plan), ""]
    if report.alone is not None and report.plan is not None:
        rate = report.plan.load.rate
        lines += [
            f"D alone holds {report.alone:.2f} requests/s: with the peer's chips it is "
            f"{rate / report.alone:.2f} times as much",
            "",
        ]
    elif report.links and report.alone is None:
        lines += ["D alone cannot hold the objectives at any rate", ""]
    if report.advice is not None:
        lines += [*to_lines(report.advice), ""]
    if report.links:
        lines += [
            "over other links",
            "  Gbit/s  threshold  offloaded  requests/s: no queues  holding  binds",
        ]
        lines += [
            f"  {row.gbit_per_s:6g}  {row.threshold_tokens:9.0f}  {row.remote_share:9.1%}  "
            f"{row.rate_without_queues:21.2f}  "
            f"{'none' if row.rate is None else f'{row.rate:.2f}':>7}  {row.binds}"
            for row in report.links
        ]
        lines.append("")
    if report.costs is not None:
        costs = report.costs
        lines += [
            "cost at the given prices",
            f"  {costs.per_hour:.2f} an hour (egress {costs.egress_per_hour:.2f}), "
            f"{costs.per_thousand_requests:.3f} for a thousand requests, "
            f"{costs.per_million_prompt_tokens:.4f} for a million prompt tokens",
            "",
        ]
    for answer in report.answers:
        lines += [f"{answer.question} {answer.choice}", f"  {answer.why}"]
    return "\n".join(lines).rstrip() + "\n"


def _capacity_lines(best: Capacity) -> list[str]:
    split = best.split
    return [
        f"  threshold {split.threshold_tokens:.0f} tokens, {split.prefill_instances} nodes "
        f"prefill, {split.decode_instances} decode",
        f"  {best.rate:.2f} requests/s; remote prefill {best.remote_rate:.2f}, local prefill "
        f"{best.local_rate:.2f}, decode {best.decode_rate:.2f}",
        f"  {best.remote_share:.1%} offloaded, {best.long_tokens:.0f} tokens each, "
        f"{best.egress_bytes_per_s * 8e-9:.2f} Gbit/s of egress; {best.binds} binds",
    ]


def _plan_lines(plan: Plan) -> list[str]:
    load = plan.load
    tails = "  ".join(f"P{share * 100:.0f} {s:.2f}" for share, s in load.ttft_s.items())
    idle = "  ".join(f"P{share * 100:.0f} {s:.2f}" for share, s in load.idle_ttft_s.items())
    used = ", ".join(f"{stage} {share:.0%}" for stage, share in load.utilisation.items())
    gains = ", ".join(f"{stage} {gain:+.1%}" for stage, gain in plan.gain.items())
    return [
        f"  {load.rate:.2f} requests/s: threshold {load.split.threshold_tokens:.0f} tokens, "
        f"{load.split.prefill_instances} nodes prefill, {load.split.decode_instances} decode "
        f"batches of {load.batch}",
        f"  TTFT mean {load.mean_ttft_s:.2f} s  {tails}   (without any load: {idle})",
        f"  ITL {load.itl_s * 1e3:.1f} ms, {load.remote_share:.1%} offloaded, "
        f"{load.egress_bytes_per_s * 8e-9:.2f} Gbit/s of egress",
        f"  busy: {used}",
        f"  {plan.binds} binds; each stage 5% faster would give: {gains}",
    ]


def _plan(
    fleet: Fleet, mix: RequestMix, scenario: Scenario, fixed: int | None
) -> Plan | Infeasible:
    try:
        return best_plan(fleet, mix, scenario.objectives, fixed)
    except Infeasible as error:
        return error


def _over(
    fleet: Fleet, mix: RequestMix, scenario: Scenario, fixed: int | None, gbit: float
) -> BandwidthRow:
    paper = best_capacity(fleet, mix, None if fixed is None else [fixed])
    plan = _plan(fleet, mix, scenario, fixed)
    if isinstance(plan, Infeasible):
        split = paper.split
        return BandwidthRow(
            gbit, split.threshold_tokens, paper.remote_share, paper.rate, None, plan.stage.value
        )
    load = plan.load
    return BandwidthRow(
        gbit,
        load.split.threshold_tokens,
        load.remote_share,
        paper.rate,
        load.rate,
        plan.binds.value,
    )


def _costs(prices: Prices, fleet: Fleet, mix: RequestMix, plan: Plan) -> Costs:
    load = plan.load
    egress = load.egress_bytes_per_s * 3600 / 1e9 * prices.egress_per_gb
    hour = (
        fleet.local_instances * prices.local_instance_per_hour
        + fleet.remote_instances * prices.remote_instance_per_hour
        + egress
    )
    requests = load.rate * 3600
    prompt = mix.mean(mix.uncached + mix.cached)
    return Costs(hour, hour / requests * 1e3, hour / (requests * prompt) * 1e6, egress)
