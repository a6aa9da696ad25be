"""A workload as the planner sees it: weighted points of uncached, cached and output tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.prefix_cache import CacheSpec, PrefixCache
from policies.workload.generate import Lengths
from policies.workload.request import Request
from prfaas.errors import ConfigError
from prfaas.profile import Profile

Vector = npt.NDArray[np.float64]

GOLDEN = (5**0.5 - 1) / 2
POINTS = 1024
"""Points kept of a longer workload: each stands for neighbours in uncached length."""


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Points in rising order of uncached tokens; weights sum to one."""

    uncached: Vector
    cached: Vector
    output: Vector
    weight: Vector

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return int(np.ceil((self.uncached + self.cached).max()))

    def mean(self, values: Vector) -> float:
        return float(self.weight @ values)

    @property
    def mean_output(self) -> float:
        return self.mean(self.output)

    @property
    def mean_context(self) -> float:
        """Tokens a sequence has in the middle of its answer."""
        return self.mean(self.uncached + self.cached + self.output / 2)

    def prefill_s(self, profile: Profile) -> Vector:
        """Seconds of each point's prefill. Raises ConfigError where the profile does not cover
        the prompts."""
        profile.require_covers(self.longest_prompt)
        return profile.time_scale * profile.prefill.seconds_of(self.uncached, self.cached)


def mix_of_lengths(lengths: Lengths, output: int | Lengths, points: int = POINTS) -> RequestMix:
    """Quantiles of generated prompts, of which nothing is cached, with answers of one length, or
    with quantiles of theirs that have nothing to do with the prompts'.
    """
    at = np.arange(points)
    tokens = _quantiles(lengths, (at + 0.5) / points)
    if isinstance(output, Lengths):
        # In the order of golden steps any run of neighbouring prompts has all lengths of answers.
        rank = np.argsort(np.argsort(at * GOLDEN % 1.0))
        answers = _quantiles(output, (rank + 0.5) / points)
    else:
        answers = np.full(points, float(output))
    return RequestMix(tokens, np.zeros(points), answers, np.full(points, 1 / points))


def _quantiles(lengths: Lengths, shares: Vector) -> Vector:
    return np.array([lengths.quantile(float(share)) for share in shares])


def mix_of_requests(
    requests: Iterable[Request], cache: CacheSpec | None = None, points: int = POINTS
) -> RequestMix:
    """Lengths of requests that pass one after the other through a prefix cache (none: unbounded).

    Raises ConfigError where there are none.
    """
    store = PrefixCache(cache or CacheSpec())
    rows: list[tuple[float, float, float]] = []
    for r in requests:
        hit = min(max(store.match(r.blocks, r.prompt_tokens), r.cached_tokens), r.prompt_tokens - 1)
        store.insert(r.blocks, r.prompt_tokens)
        rows.append((r.prompt_tokens - hit, hit, r.output_tokens))
    if not rows:
        raise ConfigError("the workload has no requests")
    table = np.array(sorted(rows), dtype=float)
    groups = np.array_split(table, min(points, len(table)))
    means = np.array([group.mean(axis=0) for group in groups])
    weight = np.array([len(group) for group in groups]) / len(table)
    return RequestMix(means[:, 0], means[:, 1], means[:, 2], weight)
