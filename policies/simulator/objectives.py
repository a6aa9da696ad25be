"""How a simulated run stands with the objectives of its scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.scenario import Objectives
from policies.simulator.result import Summary

ROUNDING = 1e-9
"""Steps of exactly the objective's length add up to a little more or less."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a summary, as people read it."""

    field: str
    name: str
    unit: str
    scale: float = 1.0
    """Of the unit, for one of the field's."""

    def of(self, summary: Summary) -> float:
        """In its unit."""
        return self.scale * float(getattr(summary, self.field))

    def told(self, value: float) -> str:
        """With its unit."""
        return f"{value:.3g} {self.unit}"


TTFT_P90 = Figure("ttft_p90_s", "TTFT P90", "s")
TTFT_P99 = Figure("ttft_p99_s", "TTFT P99", "s")
SLOWDOWN_P90 = Figure("slowdown_p90", "Slowdown P90", "times alone")
SLOWDOWN_P99 = Figure("slowdown_p99", "Slowdown P99", "times alone")
ITL_P90 = Figure("itl_p90_s", "ITL P90", "ms", 1e3)


@dataclass(frozen=True, slots=True)
class Standing:
    """One objective, and what a run reached; both in the figure's unit."""

    figure: Figure
    limit: float
    reached: float

    @property
    def excess(self) -> float:
        """Share of the objective by which it is missed; 0: it holds."""
        over = self.reached / self.limit - 1
        return over if over > ROUNDING else 0.0


def limits_of(objectives: Objectives) -> Sequence[tuple[Figure, float]]:
    """Each objective that there is, in its figure's unit."""
    listed = (
        (TTFT_P90, objectives.ttft_p90_s),
        (TTFT_P99, objectives.ttft_p99_s),
        (SLOWDOWN_P90, objectives.slowdown_p90),
        (SLOWDOWN_P99, objectives.slowdown_p99),
        (ITL_P90, objectives.itl_s),
    )
    return [(figure, figure.scale * limit) for figure, limit in listed if limit is not None]


def standings(summary: Summary, objectives: Objectives) -> Sequence[Standing]:
    """Of every objective."""
    limits = limits_of(objectives)
    return [Standing(figure, limit, figure.of(summary)) for figure, limit in limits]


def failing(summary: Summary, objectives: Objectives) -> Sequence[Standing]:
    """Those that were missed; none: the run holds all."""
    return [standing for standing in standings(summary, objectives) if standing.excess > 0]
