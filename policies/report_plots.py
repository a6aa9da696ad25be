"""Plots of simulated runs: figures over rates with their objectives, and where time goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.report_page import Key, Plot, colour, plot
from policies.scenario import Objectives, Scenario
from policies.simulator.objectives import (
    ITL_P90,
    SLOWDOWN_P90,
    SLOWDOWN_P99,
    TTFT_P90,
    TTFT_P99,
    Figure,
    limits_of,
)
from policies.simulator.result import Result, Summary
from policies.study import cost_per_million

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATE = "requests/s"
PARTS = {
    "queue_s": "queue",
    "prefill_s": "prefill",
    "transfer_s": "transfer",
    "decode_s": "decode",
}
SHOWN = (("P50", 0.5), ("P90", 0.9), ("P99", 0.99))
LOGARITHMIC = (
    Figure("ttft_p50_s", "TTFT P50", "s"),
    TTFT_P90,
    TTFT_P99,
    SLOWDOWN_P90,
    SLOWDOWN_P99,
)
OTHERS = (ITL_P90, Figure("offload_share", "Offloaded", "% of requests", 100.0))
OVERLOADED = 8.0
"""A policy that is overloaded goes off the top here, times the first one's most, or nothing else
could be told apart."""

Value = Callable[[Summary], float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy over rates."""

    name: str
    summaries: Sequence[Summary]


def key_of(curves: Sequence[Curve]) -> Key:
    """The colour of each curve."""
    return [(curve.name, colour(at)) for at, curve in enumerate(curves)]


def over_rates(curves: Sequence[Curve], scenario: Scenario) -> list[Plot]:
    """TTFT, slowdown, time between tokens, offloads, links and cost, with objectives where there
    are some. The first curve decides what is shown of the others."""
    limits = dict(limits_of(scenario.objectives))
    found = [
        _lines(
            curves, each.name, each.unit, each.of, limits.get(each), logarithmic=each in LOGARITHMIC
        )
        for each in (*LOGARITHMIC, *OTHERS)
    ]
    found.append(_lines(curves, "Busiest link", "% of its rate", _busiest_link))
    if scenario.prices is not None:
        found.append(
            _lines(
                curves,
                "Cost",
                "for a million requests",
                lambda s: cost_per_million(scenario, s.rate_per_s, s),
            )
        )
    return found


def at_limits(summaries: Sequence[Summary], objectives: Objectives) -> list[Plot]:
    """Of runs at rates that hold objectives: what each objective leaves."""
    curve = Curve("", summaries)
    return [
        _lines([curve], figure.name, figure.unit, figure.of, limit, joined=False)
        for figure, limit in limits_of(objectives)
    ]


def inside(curve: Curve, result: Result, history: Sequence[float], goal: str) -> list[Plot]:
    """Where TTFT goes and how busy stages are, of one policy; and how the search went."""
    columns = [parts_at(result, share) for _, share in SHOWN]
    labels = list(PARTS.values())

    def parts(axes: Axes) -> None:
        bottom = np.zeros(len(SHOWN))
        for at, label in enumerate(labels):
            heights = np.array([column[label] for column in columns])
            names = [name for name, _ in SHOWN]
            axes.bar(names, heights, bottom=bottom, color=colour(at), width=0.6)
            bottom += heights

    names = list(curve.summaries[0].utilisation)
    x = [s.rate_per_s for s in curve.summaries]

    def stages(axes: Axes) -> None:
        for at, name in enumerate(names):
            y = [100 * s.utilisation[name] for s in curve.summaries]
            axes.plot(x, y, marker=".", color=colour(at))

    def steps(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        values = [-v if goal == "rate" else v for v in history]
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.step(range(1, len(values) + 1), values, where="post", color=colour(0))

    return [
        plot(
            "Where TTFT goes",
            "s, at 90% of the rate",
            "percentile of TTFT",
            parts,
            key=[(label, colour(at)) for at, label in enumerate(labels)],
        ),
        plot(
            "How busy each stage is",
            "%",
            RATE,
            stages,
            key=[(name.replace("_", " "), colour(at)) for at, name in enumerate(names)],
        ),
        plot("Best trial so far", "on the part that trained", "trials", steps),
    ]


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


def _lines(
    curves: Sequence[Curve],
    title: str,
    unit: str,
    value: Value,
    limit: float | None = None,
    *,
    logarithmic: bool = False,
    joined: bool = True,
) -> Plot:
    shown = [value(s) for s in curves[0].summaries]
    held = [] if limit is None else [limit]

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        for at, curve in enumerate(curves):
            x = [s.rate_per_s for s in curve.summaries]
            y = [value(s) for s in curve.summaries]
            axes.plot(x, y, marker="." if joined else "o", color=colour(at),
                      linestyle="-" if joined else "none")  # fmt: skip
        least, most = min([*shown, *held]), max([*shown, *held])
        if logarithmic:
            axes.set(yscale="log", ylim=(0.5 * least, max(OVERLOADED * max(shown), 1.5 * most)))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif held:
            axes.set(ylim=(0, max(1.2 * most, axes.get_ylim()[1])))
        else:
            axes.set(ylim=(0, None))

    objective = None if limit is None else (limit, f"objective: {limit:.3g} {unit}")
    return plot(title, unit, RATE, draw, objective=objective)


def _busiest_link(summary: Summary) -> float:
    links = (share for stage, share in summary.utilisation.items() if stage.endswith(".link"))
    return 100 * max(links, default=0.0)
