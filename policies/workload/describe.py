"""A workload in numbers: lengths, reuse, uncached shares, burstiness; one pass, bounded work."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.prefix_cache import CacheSpec, PrefixCache
from policies.workload.request import BLOCK_TOKENS, Request
from prfaas.errors import ConfigError

SHARES = (0.5, 0.9, 0.99)
THRESHOLDS = (2048, 8192, 16384, 32768)
WINDOWS_S = (1.0, 10.0, 60.0)


@dataclass(frozen=True, slots=True)
class Spread:
    """One quantity over all requests."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Spread:
        p50, p90, p99 = (float(np.quantile(values, share)) for share in SHARES)
        return cls(float(values.mean()), p50, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Burstiness:
    """Arrivals in windows of one length."""

    window_s: float
    dispersion: float
    """Variance over mean of the counts; 1 for Poisson."""
    peak_over_mean: float


@dataclass(frozen=True, slots=True)
class Description:
    """What there is to know of a workload before anything is simulated."""

    requests: int
    span_s: float
    rate_per_s: float
    prompt: Spread
    output: Spread
    uncached: Spread
    """With the cache asked about."""
    reuse_share: float
    """Of all prompt tokens, with that cache."""
    reuse_share_unbounded: float
    full_hit_share: float
    """Of requests, that they have whole blocks and all of those were cached once."""
    uncached_above: Mapping[int, float]
    """Share of requests with more uncached tokens than this."""
    interarrival_cv2: float
    """Squared variation of the time between two arrivals; 1 for Poisson."""
    bursts: tuple[Burstiness, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        """For a terminal."""
        rate = f"{self.rate_per_s:.3g} a second" if self.span_s > 0 else "all at once"
        rows = [
            f"{self.requests} requests in {self.span_s:.4g} s: {rate}",
            "                  mean      P50      P90      P99  largest",
        ]
        for name, spread in (
            ("prompt", self.prompt),
            ("uncached", self.uncached),
            ("output", self.output),
        ):
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.largest)
            rows.append(f"{name:<9} tokens " + " ".join(f"{v:8.0f}" for v in values))
        above = ", ".join(f"{t}: {s:.1%}" for t, s in self.uncached_above.items())
        bursts = ", ".join(
            f"{b.window_s:g} s: {b.dispersion:.1f} ({b.peak_over_mean:.1f})" for b in self.bursts
        )
        rows += [
            f"reuse {self.reuse_share:.1%} of prompt tokens ({self.reuse_share_unbounded:.1%} with "
            f"a cache without bound); of {self.full_hit_share:.1%} of requests, all whole blocks",
            f"more uncached tokens than {above}",
            f"time between arrivals: squared variation {self.interarrival_cv2:.2f} (Poisson: 1)",
            f"arrivals in windows: variance over mean (and peak over mean): {bursts}",
        ]
        return "\n".join(rows) + "\n"


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that descriptions and plots are made of."""

    arrival_s: npt.NDArray[np.float64]
    prompt: npt.NDArray[np.int64]
    output: npt.NDArray[np.int64]
    uncached: npt.NDArray[np.int64]
    uncached_unbounded: npt.NDArray[np.int64]
    full_hits: int


def read_columns(requests: Iterable[Request], cache: CacheSpec) -> Columns:
    """One pass through a cache of this size and one without bound. Raises ConfigError for none."""
    bounded, unbounded = PrefixCache(cache), PrefixCache(CacheSpec())
    arrival, prompt, output = array("d"), array("q"), array("q")
    uncached, least = array("q"), array("q")
    full = 0
    for r in requests:
        most = r.prompt_tokens - 1
        hit = min(max(bounded.match(r.blocks, r.prompt_tokens), r.cached_tokens), most)
        bounded.insert(r.blocks, r.prompt_tokens)
        ever = min(max(unbounded.match(r.blocks, r.prompt_tokens), r.cached_tokens), most)
        unbounded.insert(r.blocks, r.prompt_tokens)
        arrival.append(r.arrival_s)
        prompt.append(r.prompt_tokens)
        output.append(r.output_tokens)
        uncached.append(r.prompt_tokens - hit)
        least.append(r.prompt_tokens - ever)
        whole = r.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS if r.blocks else most
        full += ever >= min(whole or most, most)
    if not arrival:
        raise ConfigError("the workload has no requests")
    return Columns(
        np.frombuffer(arrival),
        np.frombuffer(prompt, np.int64),
        np.frombuffer(output, np.int64),
        np.frombuffer(uncached, np.int64),
        np.frombuffer(least, np.int64),
        full,
    )


def describe(columns: Columns) -> Description:
    """The numbers of a workload."""
    count = len(columns.arrival_s)
    span = float(columns.arrival_s[-1] - columns.arrival_s[0])
    gaps = np.diff(columns.arrival_s)
    mean_gap = float(gaps.mean()) if count > 1 else 0.0
    total = float(columns.prompt.sum())
    return Description(
        requests=count,
        span_s=span,
        rate_per_s=(count - 1) / span if span > 0 else 0.0,
        prompt=Spread.of(columns.prompt),
        output=Spread.of(columns.output),
        uncached=Spread.of(columns.uncached),
        reuse_share=1 - float(columns.uncached.sum()) / total,
        reuse_share_unbounded=1 - float(columns.uncached_unbounded.sum()) / total,
        full_hit_share=columns.full_hits / count,
        uncached_above={t: float((columns.uncached > t).mean()) for t in THRESHOLDS},
        interarrival_cv2=float(gaps.var()) / mean_gap**2 if mean_gap > 0 else 0.0,
        bursts=tuple(_bursts(columns.arrival_s, window) for window in WINDOWS_S),
    )


def _bursts(arrival_s: npt.NDArray[np.float64], window_s: float) -> Burstiness:
    start, end = arrival_s[0], arrival_s[-1]
    windows = max(1, int((end - start) / window_s))
    at = ((arrival_s - start) / window_s).astype(np.int64)
    counts = np.bincount(at[at < windows], minlength=windows)
    mean = float(counts.mean())
    if mean <= 0:
        return Burstiness(window_s, 0.0, 0.0)
    return Burstiness(window_s, float(counts.var()) / mean, float(counts.max()) / mean)
