"""`prfaas tune`: a study, and what it found as text, JSON, a policy file and a page."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from policies.policy_file import Made, PolicyFile, to_yaml
from policies.study import Score, StudySpec, Tuned, tune
from prfaas.errors import ConfigError

UNITS = {"rate": "requests/s", "ttft": "s of mean TTFT", "cost": "for a million requests"}


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What the command line asks for."""

    spec: StudySpec
    storage: str
    trials: int
    jobs: int
    study: str | None = None
    write: Path | None = None
    report: Path | None = None


def run_tune(options: TuneOptions, as_json: bool) -> str:
    """Tune, write what was asked for, and say what came of it. Raises ConfigError."""
    if options.trials < 1 or options.jobs < 1:
        raise ConfigError("a study needs at least one trial and one process")
    tuned = tune(options.spec, options.storage, options.trials, options.jobs, name=options.study)
    if options.write is not None:
        options.write.write_text(to_yaml(policy_file(tuned, options)), encoding="utf-8")
    if options.report is not None:
        from policies.report import write_report

        write_report(tuned, options.report)
    return json.dumps(as_data(tuned), indent=2) + "\n" if as_json else to_text(tuned)


def policy_file(tuned: Tuned, options: TuneOptions) -> PolicyFile:
    """The best parameters, for a gateway."""
    spec = tuned.spec
    workload = str(spec.trace.name if spec.trace else "generated")
    return PolicyFile(
        policy_version=1,
        policy=spec.policy,
        parameters={name: rounded(value) for name, value in tuned.parameters.items()},
        made=Made(
            study=options.study or "",
            scenario=spec.scenario,
            workload=f"{workload}, first {spec.train_share:.0%}; order {tuned.queue_order}",
            objective=spec.goal,
            trials=tuned.trials,
            trained=shown(tuned, tuned.trained),
            tested=shown(tuned, tuned.tested),
        ),
    )


def rounded(value: float) -> float | int:
    """Four digits: more say nothing."""
    if isinstance(value, int) or value == 0:
        return value
    return round(value, 3 - math.floor(math.log10(abs(value))))


def shown(tuned: Tuned, score: Score) -> float:
    """The value in the goal's own sense."""
    return -score.value if tuned.spec.goal == "rate" else score.value


def as_data(tuned: Tuned) -> dict[str, Any]:
    """For JSON."""
    return {
        "policy": tuned.spec.policy,
        "goal": tuned.spec.goal,
        "scenario": tuned.spec.scenario,
        "parameters": dict(tuned.parameters),
        "queue_order": tuned.queue_order,
        "trials": tuned.trials,
        "history": list(tuned.history),
        **{
            name: {"value": shown(tuned, score), "rate_per_s": score.rate_per_s,
                   "summary": asdict(score.summary)}
            for name, score in (
                ("trained", tuned.trained), ("tested", tuned.tested),
                ("default_tested", tuned.default_tested),
            )
        },
    }  # fmt: skip


def to_text(tuned: Tuned) -> str:
    """For a terminal."""
    unit = UNITS[tuned.spec.goal]
    lines = [f"{tuned.spec.policy}, {tuned.trials} trials, queue order {tuned.queue_order}"]
    lines += [f"  {name}: {rounded(value)}" for name, value in tuned.parameters.items()]
    for what, score in (
        ("trained on", tuned.trained),
        ("tested on the rest", tuned.tested),
        ("defaults, tested", tuned.default_tested),
    ):
        summary = score.summary
        lines.append(
            f"{what:<20}{shown(tuned, score):10.4g} {unit}; TTFT mean {summary.ttft_mean_s:.3g}, "
            f"P90 {summary.ttft_p90_s:.3g}, P99 {summary.ttft_p99_s:.3g} s; "
            f"{summary.offload_share:.1%} offloaded"
        )
    return "\n".join(lines) + "\n"
