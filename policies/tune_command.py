"""`prfaas tune`: a study, and what it found as text, JSON, a policy file and a page."""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from policies.policy_file import Made, PolicyFile, to_yaml
from policies.study import Progress, Score, StudySpec, Tuned, search, tune
from policies.study_storage import shown as stored_at
from prfaas.errors import ConfigError
from prfaas.queue_settings import QueueSettings
from prfaas.whole_file import whole_file

EVERY_S = 2.0
"""Between two lines about how far a study is."""
UNITS = {
    "rate": "requests/s",
    "ttft": "s of mean TTFT",
    "cost": "for a million requests",
    "pareto": "requests/s",
}


def _silent(line: str) -> None:
    """Says nothing."""


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

    @property
    def study_name(self) -> str:
        return self.study or self.spec.study

    @property
    def command(self) -> str:
        """What searches so again, in a storage without such a study."""
        spec = self.spec
        words = ["prfaas", "tune", spec.scenario, "--policy", spec.policy, "--goal", spec.goal]
        if spec.trace is not None:
            words += ["--trace", str(spec.trace)]
        if spec.trace_format is not None:
            words += ["--trace-format", spec.trace_format]
        words += ["--train-share", f"{spec.train_share:g}"]
        order = "search" if spec.tune_order else spec.queue_order
        if order is not None:
            words += ["--queue-order", order]
        if spec.tune_shape:
            words += ["--shape"]
        words += ["--trials", str(self.trials), "--jobs", str(self.jobs)]
        if self.study is not None:
            words += ["--study", self.study]
        return shlex.join([*words, "--seed", str(spec.seed)])


def run_tune(options: TuneOptions, as_json: bool, say: Callable[[str], None] = _silent) -> str:
    """Tune, write what was asked for, and give what came of it. Raises ConfigError.

    `say` gets a line about how far it is, now and then.
    """
    if options.trials < 1 or options.jobs < 1:
        raise ConfigError("a study needs at least one trial and one process")
    for path in (options.write, options.report):
        if path is not None:
            _require_writable(path)
    reporter = Reporter(options.spec.goal, say)
    if options.spec.goal == "pareto":
        return _front(options, as_json, reporter)
    tuned = tune(
        options.spec,
        options.storage,
        options.trials,
        options.jobs,
        name=options.study,
        told=reporter.tell,
    )
    if options.write is not None:
        _write(options.write, to_yaml(policy_file(tuned, options)))
    if options.report is not None:
        from policies.report import write_report

        write_report(tuned, options.report)
    return json.dumps(as_data(tuned), indent=2) + "\n" if as_json else to_text(tuned)


def _require_writable(path: Path) -> None:
    """Before the search, which may take hours."""
    folder = path.parent
    if not os.path.isdir(folder):
        raise ConfigError(f"cannot write {path}: {folder} is no directory")
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"cannot write {path}: it is a directory, or not ours to write")


def _write(path: Path, text: str) -> None:
    """At once: a gateway may be watching the file."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def _front(options: TuneOptions, as_json: bool, reporter: Reporter) -> str:
    from policies import front

    if options.write is not None:
        raise ConfigError(
            "--write takes one best, and a Pareto front has several: "
            "tune with --goal rate or cost for it"
        )
    found = front.front_of(
        *search(
            options.spec,
            options.storage,
            options.trials,
            options.jobs,
            name=options.study,
            told=reporter.tell,
        )
    )
    if options.report is not None:
        from policies.report import write_front

        write_front(found, options.report)
    return json.dumps(front.as_data(found), indent=2) + "\n" if as_json else front.to_text(found)


class Reporter:
    """Says how far a study is, at most every `EVERY_S` and at its end; nothing to close."""

    def __init__(
        self, goal: str, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._goal, self._say, self._now = goal, say, now
        self._began = self._said_at = now()
        self._first: int | None = None

    def tell(self, progress: Progress) -> None:
        now = self._now()
        done, trials = progress.finished, progress.trials
        if self._first is None:
            self._first = done - 1
        if done < trials and now - self._said_at < EVERY_S:
            return
        self._said_at = now
        line = f"{done} of {trials} trials"
        if progress.best is None:
            line += ", none holds the objectives"
        else:
            best = -progress.best if self._goal in ("rate", "pareto") else progress.best
            line += f", best {best:.4g} {UNITS[self._goal]}"
        if done < trials:
            left_s = (now - self._began) / (done - self._first) * (trials - done)
            line += f"; about {left_s:.0f} s more"
        self._say(line)


def policy_file(tuned: Tuned, options: TuneOptions) -> PolicyFile:
    """The best parameters, for a gateway."""
    spec = tuned.spec
    workload = str(spec.trace.name if spec.trace else "generated")
    shape = "".join(
        f", {value} {name}" for name, value in asdict(tuned.shape).items() if value is not None
    )
    return PolicyFile(
        policy_version=1,
        policy=spec.policy,
        parameters={name: rounded(value) for name, value in tuned.parameters.items()},
        queue=QueueSettings.model_validate(tuned.queue_order.model_dump()),
        made=Made(
            study=options.study_name,
            storage=stored_at(options.storage),
            command=options.command,
            scenario=spec.scenario,
            workload=f"{workload}, first {spec.train_share:.0%}{shape}",
            objective=spec.goal,
            trials=tuned.trials,
            seed=spec.seed,
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
        "queue_order": tuned.queue_order.name,
        "shape": asdict(tuned.shape),
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
    lines = [f"{tuned.spec.policy}, {tuned.trials} trials, queue order {tuned.queue_order.name}"]
    lines += [f"  {name}: {rounded(value)}" for name, value in tuned.parameters.items()]
    shape = asdict(tuned.shape).items()
    lines += [f"  {name} of the site: {value}" for name, value in shape if value is not None]
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
