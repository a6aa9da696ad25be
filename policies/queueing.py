"""Queueing formulas of the planner: Erlang C, M/G/c waits, processor sharing, their tails."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

_EQUAL_RATES = 1e-6


@dataclass(frozen=True, slots=True)
class Wait:
    """Time in a queue: zero, or with `probability` exponential with mean `mean_s`."""

    probability: float
    mean_s: float

    @property
    def stable(self) -> bool:
        return math.isfinite(self.mean_s)

    @property
    def overall_mean_s(self) -> float:
        return self.probability * self.mean_s if self.probability else 0.0


NO_WAIT = Wait(0.0, 0.0)
FOREVER = Wait(1.0, math.inf)


def erlang_c(servers: int, offered: float) -> float:
    """Share of arrivals that wait in M/M/c; `offered` load in servers, below `servers`."""
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    utilisation = offered / servers
    return blocked / (1 - utilisation * (1 - blocked))


def mgc_wait(rate: float, servers: int, mean_s: float, second_moment: float) -> Wait:
    """Wait in M/G/c: that of M/M/c, longer or shorter by the service's variation (Lee, Longton).

    Exact for one server in the mean, and for exponential service throughout.
    """
    if rate <= 0 or mean_s <= 0:
        return NO_WAIT
    if servers < 1 or rate * mean_s >= servers:
        return FOREVER
    offered = rate * mean_s
    waits = erlang_c(servers, offered)
    variation = (second_moment / mean_s**2) / 2
    return Wait(waits, variation * mean_s / (servers - offered))


def shared_link_stretch(utilisation: float) -> float:
    """How much longer a transfer takes than alone on a link that all share (M/G/1-PS)."""
    return 1 / (1 - utilisation) if utilisation < 1 else math.inf


def late_share(slack_s: Vector, weight: Vector, first: Wait, second: Wait) -> float:
    """Share of requests for which two independent waits together exceed their slack.

    `slack_s`: for each point, the time left for waiting; negative: late in any case.
    """
    if not (first.stable and second.stable):
        return 1.0
    y = np.maximum(slack_s, 0.0)
    exceeds = (
        first.probability * (1 - second.probability) * _tail(y, first.mean_s)
        + second.probability * (1 - first.probability) * _tail(y, second.mean_s)
        + first.probability * second.probability * _sum_tail(y, first.mean_s, second.mean_s)
    )
    return float(weight @ np.where(slack_s < 0, 1.0, exceeds))


def _tail(y: Vector, mean_s: float) -> Vector:
    return np.exp(-y / mean_s) if mean_s > 0 else np.zeros_like(y)


def _sum_tail(y: Vector, a: float, b: float) -> Vector:
    """Tail of the sum of two exponentials with means a and b."""
    if a <= 0 or b <= 0:
        return _tail(y, max(a, b))
    if abs(a - b) <= _EQUAL_RATES * max(a, b):
        return (1 + y / a) * np.exp(-y / a)
    return (a * np.exp(-y / a) - b * np.exp(-y / b)) / (a - b)
