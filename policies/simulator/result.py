"""What a simulated run gave: a row for each request, and the figures people compare."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Row:
    """One request; times in seconds. The parts add up to `ttft_s`."""

    number: int
    arrival_s: float
    prompt_tokens: int
    uncached_tokens: int
    """That D lacked when it was decided."""
    ttft_s: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    """Not hidden behind the computation; round trip, import and tries that failed with it."""
    decode_s: float
    """Waiting for a place in the batch, and the step of the first token."""
    remote: bool
    reason: str
    fallback: str
    moves: int
    """From site to site, while it waited."""
    itl_s: float
    """Mean between two tokens of its answer; 0 where there was one."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers."""

    policy: str
    requests: int
    rate_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    slowdown_mean: float
    """TTFT over that of the same request alone on the fastest site."""
    slowdown_p90: float
    slowdown_p99: float
    longest_decile_p99_s: float
    """P99 of TTFT of the tenth of requests with most uncached tokens."""
    offload_share: float
    reasons: Mapping[str, int]
    fallbacks: Mapping[str, int]
    moved_share: float
    """Requests that moved while they waited."""
    utilisation: Mapping[str, float]
    egress_gb: float
    hit_share: float
    """Prompt tokens that D had cached."""
    parts_s: Mapping[str, float]
    """Mean seconds of TTFT by part."""
    itl_mean_s: float
    itl_p90_s: float
    """Of answers, each in its mean."""


@dataclass(frozen=True, slots=True)
class Result:
    """Rows in order of arrival, and the run's own counters."""

    policy: str
    rows: Sequence[Row]
    fastest_s: Sequence[float]
    """TTFT of each row alone on the fastest site."""
    utilisation: Mapping[str, float]
    egress_bytes: float
    events: int
    peak_staging_bytes: float

    def summary(self, start_s: float = 0.0) -> Summary:
        """Figures over requests that arrived at `start_s` or later (what came before warms up)."""
        picked = [i for i, row in enumerate(self.rows) if row.arrival_s >= start_s]
        rows = [self.rows[i] for i in picked]
        if not rows:
            raise ValueError(f"no request arrives after {start_s:g} s")
        ttft = np.array([row.ttft_s for row in rows])
        slowdown = ttft / np.array([self.fastest_s[i] for i in picked])
        uncached = np.array([row.uncached_tokens for row in rows])
        longest = np.argsort(uncached, kind="stable")[-max(1, len(rows) // 10) :]
        itl = np.array([row.itl_s for row in rows if row.itl_s > 0] or [0.0])
        span = rows[-1].arrival_s - rows[0].arrival_s
        prompt = sum(row.prompt_tokens for row in rows)
        parts = ("queue_s", "prefill_s", "transfer_s", "decode_s")
        p50, p90, p99 = (float(np.quantile(ttft, share)) for share in SHARES)
        return Summary(
            policy=self.policy,
            requests=len(rows),
            rate_per_s=(len(rows) - 1) / span if span > 0 else 0.0,
            ttft_mean_s=float(ttft.mean()),
            ttft_p50_s=p50,
            ttft_p90_s=p90,
            ttft_p99_s=p99,
            slowdown_mean=float(slowdown.mean()),
            slowdown_p90=float(np.quantile(slowdown, 0.9)),
            slowdown_p99=float(np.quantile(slowdown, 0.99)),
            longest_decile_p99_s=float(np.quantile(ttft[longest], 0.99)),
            offload_share=sum(row.remote for row in rows) / len(rows),
            reasons=dict(sorted(Counter(row.reason for row in rows).items())),
            fallbacks=dict(sorted(Counter(r.fallback for r in rows if r.fallback).items())),
            moved_share=sum(row.moves > 0 for row in rows) / len(rows),
            utilisation=self.utilisation,
            egress_gb=self.egress_bytes / 1e9,
            hit_share=1 - float(uncached.sum()) / max(1, prompt),
            itl_mean_s=float(itl.mean()),
            itl_p90_s=float(np.quantile(itl, 0.9)),
            parts_s={name: float(np.mean([getattr(row, name) for row in rows])) for name in parts},
        )

    def digest(self) -> str:
        """The same for two runs only if every figure of every row is the same."""
        data = [asdict(row) for row in self.rows]
        text = json.dumps([data, self.utilisation, self.egress_bytes, self.events])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
