"""A page on a finished study: what it found, beside other policies, on the part that tests."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from policies.registry import make_policy
from policies.scenario import Objectives
from policies.simulator.result import Result, Summary
from policies.simulator.run import simulate
from policies.study import Problem, Tuned
from prfaas.errors import ConfigError
from prfaas.settings import PolicySettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHARES_OF_RATE = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Of the tuned policy's rate: where the curves have points."""
BESIDE = ("always_local", "paper", "least_ttft")
MOST_REQUESTS = 4000
PARTS = {
    "queue_s": "queue",
    "prefill_s": "prefill",
    "transfer_s": "transfer",
    "decode_s": "decode",
}
SHOWN = (("P50", 0.5), ("P90", 0.9), ("P99", 0.99))


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy over rates."""

    name: str
    summaries: Sequence[Summary]


def write_report(tuned: Tuned, path: Path) -> None:
    """Simulate the curves and write the page. Raises ConfigError."""
    problem = Problem.read(tuned.spec).shaped(tuned.shape)
    rates = [share * tuned.tested.rate_per_s for share in SHARES_OF_RATE]
    usual = problem.scenario.queue_order.name
    name = tuned.spec.policy
    arms: dict[str, tuple[str, Mapping[str, float], str]] = {
        f"{name}, tuned": (name, tuned.parameters, tuned.queue_order.name),
        f"{name}, defaults": (name, {}, usual),
        **{other: (other, {}, usual) for other in BESIDE if other != name},
    }
    curves, at_rate = [], None
    for label, (policy, parameters, order) in arms.items():
        results = [_run(problem, policy, parameters, order, rate) for rate in rates]
        if at_rate is None:
            at_rate = results[SHARES_OF_RATE.index(0.9)]
        curves.append(Curve(label, [result.summary() for result in results]))
    assert at_rate is not None
    page = _TEMPLATE.render(
        tuned=tuned,
        goal=tuned.spec.goal,
        better=_better(tuned),
        curves=curves,
        scenario=problem.scenario,
        binds=_binds(curves[0].summaries),
        shares=SHARES_OF_RATE,
        plots=[
            _svg(_over_rates(curves, problem.scenario.objectives)),
            _svg(_inside(tuned, curves[0], at_rate)),
        ],
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def parts_at(result: Result, share: float) -> dict[str, float]:
    """Mean parts of TTFT of the hundredth of requests around a percentile of TTFT."""
    order = np.argsort([row.ttft_s for row in result.rows], kind="stable")
    half = max(1, len(order) // 200)
    at = min(len(order) - 1, int(share * len(order)))
    around = order[max(0, at - half) : at + half]
    return {
        label: float(np.mean([getattr(result.rows[i], name) for i in around]))
        for name, label in PARTS.items()
    }


def _run(
    problem: Problem, policy: str, parameters: Mapping[str, float], order: str, rate: float
) -> Result:
    queue_order = problem.scenario.queue_order.model_copy(update={"name": order})
    scenario = problem.scenario.model_copy(update={"queue_order": queue_order})
    settings = PolicySettings.model_validate({"name": policy, **parameters})
    requests = problem.testing.at(rate)[:MOST_REQUESTS]
    return simulate(scenario, problem.profiles, requests, make_policy(settings))


def _binds(summaries: Sequence[Summary]) -> list[tuple[float, str, float]]:
    """At each rate the busiest stage and its share of time."""
    found = []
    for summary in summaries:
        stage = max(summary.utilisation, key=summary.utilisation.__getitem__)
        found.append((summary.rate_per_s, stage.replace("_", " "), summary.utilisation[stage]))
    return found


def _better(tuned: Tuned) -> str:
    ours, default = tuned.tested.value, tuned.default_tested.value
    ratio = ours / default if tuned.spec.goal == "rate" else default / ours
    if abs(ratio - 1) < 0.005:
        return "no better than the defaults on requests it had not seen"
    word = "better" if ratio > 1 else "worse"
    return f"{abs(ratio - 1):.1%} {word} than the defaults on requests it had not seen"


def _over_rates(curves: Sequence[Curve], objectives: Objectives) -> Figure:
    figure = _figure(7.6)
    p50, p90, p99, slow, away, link = figure.subplots(2, 3).flat
    for curve in curves:
        x = [s.rate_per_s for s in curve.summaries]
        style = {"marker": ".", "label": curve.name, "linewidth": 1.4}
        p50.plot(x, [s.ttft_p50_s for s in curve.summaries], **style)
        p90.plot(x, [s.ttft_p90_s for s in curve.summaries], **style)
        p99.plot(x, [s.ttft_p99_s for s in curve.summaries], **style)
        slow.plot(x, [s.slowdown_p90 for s in curve.summaries], **style)
        away.plot(x, [100 * s.offload_share for s in curve.summaries], **style)
        use = [
            max((v for k, v in s.utilisation.items() if k.endswith(".link")), default=0.0)
            for s in curve.summaries
        ]
        link.plot(x, [100 * share for share in use], **style)
    for axes, title, unit in (
        (p50, "TTFT P50", "s"),
        (p90, "TTFT P90", "s"),
        (p99, "TTFT P99", "s"),
        (slow, "Slowdown P90", "times alone"),
        (away, "Offloaded", "% of requests"),
        (link, "Busiest link", "% of its rate"),
    ):
        axes.set(title=title, ylabel=unit, xlabel="requests/s")
        axes.grid(alpha=0.25)
    for axes in (p50, p90, p99, slow):
        # A policy that is overloaded goes off the top, or nothing else could be told apart.
        shown = axes.lines[0].get_ydata()
        axes.set(yscale="log", ylim=(0.5 * float(np.min(shown)), 8 * float(np.max(shown))))
    handles, labels = p50.get_legend_handles_labels()
    for axes, held_s in ((p90, objectives.ttft_p90_s), (p99, objectives.ttft_p99_s)):
        if held_s is not None:
            axes.axhline(held_s, color="#667", linewidth=1, linestyle="--", label="objective")
            axes.legend(*(each[-1:] for each in axes.get_legend_handles_labels()), frameon=False)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(curves), frameon=False)
    return figure


def _inside(tuned: Tuned, curve: Curve, result: Result) -> Figure:
    figure = _figure(3.6)
    parts, stages, history = figure.subplots(1, 3)
    bottom = np.zeros(len(SHOWN))
    columns = [parts_at(result, share) for _, share in SHOWN]
    for label in PARTS.values():
        heights = np.array([column[label] for column in columns])
        parts.bar([name for name, _ in SHOWN], heights, bottom=bottom, label=label)
        bottom += heights
    parts.set(title="Where TTFT goes, at 90% of the rate", ylabel="s")
    parts.legend(frameon=False)
    x = [s.rate_per_s for s in curve.summaries]
    for name in curve.summaries[0].utilisation:
        stages.plot(x, [100 * s.utilisation[name] for s in curve.summaries], marker=".", label=name)
    stages.set(title="How busy each stage is", ylabel="%", xlabel="requests/s")
    stages.legend(frameon=False)
    values = [-v if tuned.spec.goal == "rate" else v for v in tuned.history]
    _steps(history, values)
    for axes in (parts, stages, history):
        axes.grid(alpha=0.25)
    return figure


def _steps(axes: Axes, values: Sequence[float]) -> None:
    axes.step(range(1, len(values) + 1), values, where="post")
    axes.set(title="Best trial so far", xlabel="trials", ylabel="value on the training part")


def _figure(height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a report needs matplotlib: pip install 'prfaas[tune]'") from error
    return Figure(figsize=(12, height), layout="constrained")


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    options: dict[str, Any] = {"metadata": {"Date": None}}
    figure.savefig(text, format="svg", **options)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


_TEMPLATE = jinja2.Environment(autoescape=True).from_string(
    """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Study of {{ tuned.spec.policy }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem;
  color: #1c2430; }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .7rem; border-bottom: 1px solid #dde2ea; text-align: right;
  white-space: nowrap }
td:first-child, th:first-child { text-align: left; padding-left: 0 }
svg { width: 100%; height: auto } .lead { font-size: 1.1rem } .quiet { color: #667 }
</style>
<h1>{{ tuned.spec.policy }} on {{ scenario.name }}</h1>
<p class="lead">{{ tuned.trials }} trials for <b>{{ goal }}</b>: {{ better }}.</p>
<p class="quiet">Workload: {{ tuned.spec.trace or "generated" }}. The first
{{ "%.0f" % (100 * tuned.spec.train_share) }}% trained; every other figure here is of the rest.
Queue order: {{ tuned.queue_order.name }}.</p>
<h2>Result</h2>
<table><tr><th></th><th>requests/s</th><th>TTFT mean</th><th>P50</th><th>P90</th><th>P99</th>
<th>slowdown P90</th><th>offloaded</th><th>moved</th><th>egress GB</th></tr>
{% for what, score in (("tuned, training part", tuned.trained), ("tuned", tuned.tested),
("defaults", tuned.default_tested)) %}{% set s = score.summary %}
<tr><td>{{ what }}</td><td>{{ "%.3g" % score.rate_per_s }}</td>
<td>{{ "%.2f" % s.ttft_mean_s }} s</td>
<td>{{ "%.2f" % s.ttft_p50_s }} s</td><td>{{ "%.2f" % s.ttft_p90_s }} s</td>
<td>{{ "%.2f" % s.ttft_p99_s }} s</td><td>{{ "%.2f" % s.slowdown_p90 }}</td>
<td>{{ "%.1f" % (100 * s.offload_share) }}%</td><td>{{ "%.1f" % (100 * s.moved_share) }}%</td>
<td>{{ "%.0f" % s.egress_gb }}</td></tr>{% endfor %}</table>
<h2>Parameters</h2>
<table>{% for name, value in tuned.parameters.items() %}<tr><td>{{ name }}</td>
<td>{{ "%.4g" % value }}</td></tr>{% endfor %}</table>
<h2>Over rates</h2>{{ plots[0] | safe }}
<h2>Inside the tuned policy</h2>{{ plots[1] | safe }}
<h2>Which stage binds</h2>
<p class="quiet">The busiest of them, at each rate.</p>
<table><tr><th>requests/s</th><th>stage</th><th>busy</th></tr>
{% for rate, stage, share in binds %}<tr><td>{{ "%.3g" % rate }}</td><td>{{ stage }}</td>
<td>{{ "%.0f" % (100 * share) }}%</td></tr>{% endfor %}</table>
</html>
"""
)
