"""How the tuner's pages look: plots that follow light and dark, each by itself, and tables."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from prfaas.errors import ConfigError
from prfaas.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET = "#123457", "#123458"
"""Of plots: they become the page's own colours of text, whatever those are."""
COLOURS = ("#2f7ee6", "#e06c00", "#1f9d57", "#c2419b", "#8560e0", "#0f93a8", "#b08900", "#d9463e")
"""Of lines, legible on white and on black; after the last one comes the first."""
SIZE = (4.3, 2.7)

Draw = Callable[["Axes"], None]
Key = Sequence[tuple[str, str]]
"""What lines are called, each with its colour."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot as a page has it."""

    title: str
    unit: str
    svg: str
    key: Key = ()
    """Of its own; plots that have the same lines share one."""
    objective: str = ""
    """The line across it, in words; empty: there is none."""


def colour(at: int) -> str:
    """Of a line by its number."""
    return COLOURS[at % len(COLOURS)]


def plot(
    title: str,
    unit: str,
    across: str,
    draw: Draw,
    *,
    key: Key = (),
    objective: tuple[float, str] | None = None,
) -> Plot:
    """`draw` puts lines into axes; `across`: what they run over; `objective`: where its line is,
    and what it says. Raises ConfigError where matplotlib is missing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a report needs matplotlib: pip install 'prfaas[tune]'") from error
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": f"{title} {unit}",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": QUIET,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": QUIET,
        "grid.alpha": 0.2,
        "lines.linewidth": 1.5,
        "lines.markersize": 5,
    }
    with rc_context(style):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set(xlabel=across)
        axes.grid()
        axes.set_axisbelow(True)
        if objective is not None:
            axes.axhline(objective[0], color=INK, linewidth=1.2, linestyle=(0, (5, 3)))
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "var(--ink)").replace(QUIET, "var(--quiet)")
    return Plot(title, unit, svg, key, "" if objective is None else objective[1])


def number(value: float) -> str:
    """For people: four digits, and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def write_page(path: Path, template: str, **values: Any) -> None:
    """Fill the template of that name, one of `TEMPLATES`. Raises ConfigError."""
    page = _PAGES.get_template(template).render(**values)
    with whole_file(path) as part:
        part.write_text(page, encoding="utf-8")


_BASE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{% block title %}{% endblock %}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --ink: #1c2430; --back: #fff; --quiet: #5b6675; --line: #dde2ea;
  --good: #137a3e; --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --back: #12161c; --quiet: #9aa5b4;
  --line: #2c3440; --good: #5fce8f; --bad: #ff8a80 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--back) }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap }
td:first-child, th:first-child { text-align: left; padding-left: 0 }
.lead { font-size: 1.1rem } .quiet { color: var(--quiet) } .good { color: var(--good) }
.bad { color: var(--bad) }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr));
  gap: 1.2rem }
.plots.large { grid-template-columns: minmax(0, 34rem) }
figure { margin: 0 } figcaption { font-weight: 600 } figcaption .quiet { font-weight: 400 }
svg { width: 100%; height: auto; display: block }
.key { display: flex; flex-wrap: wrap; gap: .1rem 1rem; list-style: none; margin: .3rem 0 .6rem;
  padding: 0 }
.key i { display: inline-block; width: 1.4em; border-top: 3px solid; vertical-align: middle;
  margin-right: .4em }
.key i.line { border-top: 2px dashed var(--ink) }
</style>
{% macro key(lines, objective="") %}{% if lines or objective %}<ul class="key">
{% for name, colour in lines %}<li><i style="border-color: {{ colour }}"></i>{{ name }}</li>
{% endfor %}{% if objective %}<li><i class="line"></i>{{ objective }}</li>{% endif %}</ul>
{% endif %}{% endmacro %}
{% macro figures(plots, size="") %}<div class="plots {{ size }}">{% for plot in plots %}
<figure><figcaption>{{ plot.title }} <span class="quiet">{{ plot.unit }}</span></figcaption>
{{ plot.svg | safe }}{{ key(plot.key, plot.objective) }}</figure>{% endfor %}</div>{% endmacro %}
{% block page %}{% endblock %}
</html>
"""

_STUDY = """{% extends "base" %}
{% block title %}Study of {{ tuned.spec.policy }}{% endblock %}
{% block page %}
<h1>{{ tuned.spec.policy }} on {{ scenario.name }}</h1>
<p class="lead">{{ tuned.trials }} trials for <b>{{ goal }}</b>: {{ better }}.</p>
<p class="quiet">Workload: {{ tuned.spec.trace or "generated" }}. The first
{{ "%.0f" % (100 * tuned.spec.train_share) }}% trained; every other figure here is of the rest.
Queue order: {{ tuned.queue_order.name }}.</p>
<h2>Result</h2>
<div class="wide"><table><tr><th></th><th>requests/s</th><th>TTFT mean</th><th>P50</th><th>P90</th>
<th>P99</th><th>slowdown P90</th><th>P99</th><th>ITL P90</th><th>offloaded</th><th>moved</th>
<th>egress GB</th>{% if prices %}<th>for a million</th>{% endif %}</tr>
{% for what, score, cost in results %}{% set s = score.summary %}
<tr><td>{{ what }}</td><td>{{ "%.3g" % score.rate_per_s }}</td>
<td>{{ "%.2f" % s.ttft_mean_s }} s</td>
<td>{{ "%.2f" % s.ttft_p50_s }} s</td><td>{{ "%.2f" % s.ttft_p90_s }} s</td>
<td>{{ "%.2f" % s.ttft_p99_s }} s</td><td>{{ "%.2f" % s.slowdown_p90 }}</td>
<td>{{ "%.2f" % s.slowdown_p99 }}</td><td>{{ "%.1f" % (1000 * s.itl_p90_s) }} ms</td>
<td>{{ "%.1f" % (100 * s.offload_share) }}%</td><td>{{ "%.1f" % (100 * s.moved_share) }}%</td>
<td>{{ "%.0f" % s.egress_gb }}</td>{% if prices %}<td>{{ cost | number }}</td>{% endif %}</tr>
{% endfor %}</table></div>
{% if objectives %}<h2>Objectives</h2>
<div class="wide"><table><tr><th></th><th>at most</th>{% for what, s, c in results %}
<th>{{ what }}</th>{% endfor %}</tr>
{% for row in objectives %}{% set figure = row[0].figure %}
<tr><td>{{ figure.name }}</td><td>{{ figure.told(row[0].limit) }}</td>
{% for each in row %}<td class="{{ "bad" if each.excess else "good" }}">
{{ figure.told(each.reached) }}{{ ", missed" if each.excess }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endif %}
<h2>Parameters</h2>
<div class="wide"><table>{% for name, value in tuned.parameters.items() %}<tr><td>{{ name }}</td>
<td>{{ value | number }}</td></tr>{% endfor %}</table></div>
<h2>Over rates</h2>
<p class="quiet">Where a line is missing that policy is overloaded, and off the top.</p>
{{ key(lines) }}{{ figures(over_rates) }}
<h2>Inside the tuned policy</h2>{{ figures(inside) }}
<h2>Which stage binds</h2>
<p class="quiet">The busiest of them, at each rate.</p>
<div class="wide"><table><tr><th>requests/s</th><th>stage</th><th>busy</th></tr>
{% for rate, stage, share in binds %}<tr><td>{{ "%.3g" % rate }}</td><td>{{ stage }}</td>
<td>{{ "%.0f" % (100 * share) }}%</td></tr>{% endfor %}</table></div>
{% endblock %}
"""

_FRONT = """{% extends "base" %}
{% block title %}Front of {{ front.spec.policy }}{% endblock %}
{% block page %}
<h1>{{ front.spec.policy }} on {{ scenario.name }}</h1>
<p class="lead">{{ front.trials }} trials for <b>rate and cost</b>: nothing tried has a higher rate
at a lower cost than {{ "one of these" if front.points | length > 1 else "this" }}.</p>
<p class="quiet">Workload: {{ front.spec.trace or "generated" }}. The first
{{ "%.0f" % (100 * front.spec.train_share) }}% trained; the rest tested what was found.</p>
<h2>Rate and cost</h2>{{ figures(main, "large") }}
<h2>The best</h2>
<div class="wide"><table><tr><th></th><th>requests/s</th><th>for a million</th>
<th>tested: requests/s</th><th>for a million</th><th>queue order</th>
{% if shaped %}<th>D prefills</th><th>peer's instances</th>{% endif %}
{% for name in parameters %}<th>{{ name }}</th>{% endfor %}</tr>
{% for point in front.points %}<tr><td>{{ loop.index }}</td>
<td>{{ "%.3g" % point.rate_per_s }}</td><td>{{ point.cost | number }}</td>
{% if point.tested %}<td>{{ "%.3g" % point.tested.rate_per_s }}</td>
<td>{{ point.tested.cost | number }}</td>
{% else %}<td class="bad">none</td><td></td>{% endif %}<td>{{ point.queue_order }}</td>
{% if shaped %}<td>{{ shown(point.shape.prefill_instances) }}</td>
<td>{{ shown(point.shape.peer_instances) }}</td>{% endif %}
{% for name in parameters %}<td>{{ point.parameters[name] | number }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% if tested %}<h2>Each at its highest rate, tested</h2>
<p class="quiet">The rate is the highest that holds the objectives on requests the search had not
seen.</p>{{ figures(tested) }}{% endif %}
{% endblock %}
"""

TEMPLATES: Mapping[str, str] = {"base": _BASE, "study": _STUDY, "front": _FRONT}
_PAGES = jinja2.Environment(autoescape=True, loader=jinja2.DictLoader(dict(TEMPLATES)))
_PAGES.filters["number"] = number
